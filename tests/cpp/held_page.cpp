#include "held_page.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace {

// What the handler may look at: it runs on a copy thread, in the middle of an instruction.
std::atomic<std::byte*> held_page{nullptr};
std::atomic<bool> opened{false};
std::atomic<bool> touched{false};
static_assert(std::atomic<std::byte*>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

void wait_for_page(int signal, siginfo_t* info, void* /*context*/) {
  const auto page = reinterpret_cast<std::uintptr_t>(held_page.load());
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (address < page || address >= page + HeldPage::kBytes) {
    std::signal(signal, SIG_DFL);  // a real fault: the instruction runs again and ends the process
    return;
  }
  touched = true;
  while (!opened) {
    usleep(200);
  }
}

}  // namespace

HeldPage::HeldPage() {
  void* page = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);
  REQUIRE(held_page.exchange(static_cast<std::byte*>(page)) == nullptr);
  opened = false;
  touched = false;
  struct sigaction action {};
  action.sa_sigaction = &wait_for_page;
  action.sa_flags = SA_SIGINFO;
  REQUIRE(sigaction(SIGSEGV, &action, &previous_) == 0);
}

HeldPage::~HeldPage() {
  open();
  sigaction(SIGSEGV, &previous_, nullptr);
  held_page = nullptr;  // it stays mapped: copies of it may still run
}

void HeldPage::fill(std::byte value) {
  REQUIRE(mprotect(data(), kBytes, PROT_READ | PROT_WRITE) == 0);
  std::memset(data(), static_cast<int>(value), kBytes);
  REQUIRE(mprotect(data(), kBytes, PROT_NONE) == 0);
}

void HeldPage::open() {
  mprotect(data(), kBytes, PROT_READ | PROT_WRITE);
  opened = true;
}

void HeldPage::wait_until_touched() const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!touched) {
    REQUIRE(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

std::byte* HeldPage::data() const { return held_page; }
