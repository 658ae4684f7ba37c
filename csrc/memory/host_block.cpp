#include "memory/host_block.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "errors.hpp"
#include "memory/memory_limits.hpp"
#include "memory/numa.hpp"
#include "memory_bound_threads.hpp"

namespace shardsnap {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPiece = std::size_t{32} << 20;
constexpr std::size_t kPiecesPerCheck = 32;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older headers lack the name

std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

[[noreturn]] void throw_refused(const char* what, std::size_t bytes, int error) {
  throw ArenaFullError(std::string(what) + " refused " + format_bytes(bytes) +
                           " of host memory: " + std::generic_category().message(error) +
                           ". See ulimit -v and vm.overcommit_memory, or ask for less.",
                       bytes, 0, 0);
}

// `bytes` is a multiple of the page size.
std::byte* map_aligned(std::size_t bytes, std::size_t alignment) {
  // The kernel aligns to pages only, so reserve one alignment more and give the ends back.
  const std::size_t slack = alignment > page_size() ? alignment : 0;
  void* mapping = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    throw_refused("mmap", bytes, errno);
  }
  if (slack == 0) {
    return static_cast<std::byte*>(mapping);
  }
  auto* begin = static_cast<std::byte*>(mapping);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t before = round_up(address, alignment) - address;
  if (before > 0) {
    munmap(begin, before);
  }
  if (slack > before) {
    munmap(begin + before + bytes, slack - before);
  }
  return begin + before;
}

// False where this kernel cannot.
bool populate(std::byte* address, std::size_t bytes) {
  while (madvise(address, bytes, kPopulateWrite) != 0) {
    if (errno == EINVAL) {
      return false;
    }
    if (errno != EINTR && errno != EAGAIN) {
      throw_refused("the kernel", bytes, errno);
    }
  }
  return true;
}

// Pieces of one block, handed to whichever thread is free, until done or until one of them fails.
class PrefaultJob {
 public:
  PrefaultJob(std::byte* address, std::size_t bytes, const RoomCheck& check)
      : address_(address), bytes_(bytes), check_(check) {}

  void work() noexcept {
    try {
      while (!failed_) {
        const std::size_t piece = next_piece_.fetch_add(1);
        const std::size_t offset = piece * kPiece;
        if (offset >= bytes_) {
          return;
        }
        // Several ranks that start together all pass the first check, so look again as memory fills.
        if (piece % kPiecesPerCheck == 0) {
          check_(bytes_ - offset);
        }
        fill(offset, std::min(kPiece, bytes_ - offset));
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex_);
      failure_ = std::current_exception();
      failed_ = true;
    }
  }

  // Call when no thread is at work any more.
  void rethrow_failure() const {
    if (failure_) {
      std::rethrow_exception(failure_);
    }
  }

 private:
  void fill(std::size_t offset, std::size_t bytes) const {
    if (!populate(address_ + offset, bytes)) {
      touch_pages(address_ + offset, bytes);
    }
  }

  std::byte* address_;
  std::size_t bytes_;
  const RoomCheck& check_;
  std::atomic<std::size_t> next_piece_{0};
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

// Threads that help the caller with a job and are gone when this is.
class Helpers {
 public:
  Helpers(unsigned count, PrefaultJob& job) {
    threads_.reserve(count);
    try {
      while (threads_.size() < count) {
        threads_.emplace_back([&job] { job.work(); });
      }
    } catch (const std::system_error&) {
      // A container's limit on threads: those there are, the caller among them, do all of it.
      return;
    }
  }
  ~Helpers() {
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

 private:
  std::vector<std::thread> threads_;
};

}  // namespace

HostBlock::HostBlock(std::size_t bytes, std::size_t alignment)
    : data_(map_aligned(round_up(bytes, page_size()), alignment)), bytes_(bytes), owner_(getpid()) {}

// Delegates, so that what throws below finds a block that the destructor unmaps.
HostBlock::HostBlock(std::size_t bytes, int numa_node, bool huge_pages)
    : HostBlock(bytes, huge_pages && bytes >= kHugePage ? kHugePage : page_size()) {
  if (huge_pages) {
    madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: a kernel without huge pages works with small ones
  }
  // Fork would copy pinned pages into the child at once, or on older kernels leave the device with the wrong ones.
  madvise(data_, bytes_, MADV_DONTFORK);
  if (numa_node >= 0) {
    bind_failure_ = bind_to_node(data_, bytes_, numa_node, NumaTopology());
  }
}

HostBlock::~HostBlock() {
  // In a child of fork() something else may lie at this address by now.
  if (in_owner_process()) {
    munmap(data_, round_up(bytes_, page_size()));
  }
}

void HostBlock::prefault(unsigned threads, const RoomCheck& check) {
  const std::size_t pieces = round_up(bytes_, kPiece) / kPiece;
  const auto wanted = std::size_t{threads == 0 ? memory_bound_threads() : threads};
  PrefaultJob job(data_, bytes_, check);
  {
    const Helpers helpers(static_cast<unsigned>(std::min(wanted, pieces) - 1), job);
    job.work();
  }
  job.rethrow_failure();
}

bool HostBlock::in_owner_process() const { return getpid() == owner_; }

void touch_pages(std::byte* address, std::size_t bytes) {
  const std::size_t page = page_size();
  for (std::size_t offset = 0; offset < bytes; offset += page) {
    *const_cast<volatile std::byte*>(address + offset) = std::byte{0};
  }
}

}  // namespace shardsnap
