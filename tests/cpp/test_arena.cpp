#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "memory/arena.hpp"
#include "memory/host_block.hpp"
#include "memory/memory_limits.hpp"

namespace {

using shardsnap::ArenaFullError;
using shardsnap::ArenaOptions;
using shardsnap::Extent;
using shardsnap::HostBlock;
using shardsnap::HostPinner;
using shardsnap::make_arena;
using shardsnap::PinMode;
using shardsnap::PinningError;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t resident_bytes() {
  std::size_t total = 0;
  std::size_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// What code, stacks and the heap may add while a test looks at the resident size.
constexpr std::size_t kNoise = 4 * kMiB;

std::size_t resident_pages(const std::byte* address, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> flags((bytes + page - 1) / page);
  if (mincore(const_cast<std::byte*>(address), bytes, flags.data()) != 0) {
    return 0;
  }
  return static_cast<std::size_t>(
      std::count_if(flags.begin(), flags.end(), [](unsigned char flag) { return (flag & 1U) != 0; }));
}

bool mapped_here(const std::byte* address) {
  unsigned char flag = 0;
  return mincore(const_cast<std::byte*>(address), 1, &flag) == 0;
}

// Keeps count of what is pinned; a test fails when something is unpinned that is not pinned or no longer mapped.
class CountingPinner : public HostPinner {
 public:
  void pin(void* address, std::size_t bytes) override {
    CHECK(resident_pages(static_cast<std::byte*>(address), bytes) > 0);
    ++pins;
    pinned[address] = bytes;
  }
  void unpin(void* address) noexcept override {
    CHECK(mapped_here(static_cast<std::byte*>(address)));
    CHECK(pinned.erase(address) == 1);
  }

  int pins = 0;
  std::map<void*, std::size_t> pinned;
};

class RefusingPinner : public HostPinner {
 public:
  void pin(void* /*address*/, std::size_t /*bytes*/) override { throw PinningError("driver says no (error 801)"); }
  void unpin(void* /*address*/) noexcept override { FAIL_CHECK("nothing was pinned"); }
};

ArenaOptions options_of(std::size_t capacity, std::size_t growth = 0) {
  ArenaOptions options;
  options.capacity = capacity;
  options.growth = growth;
  return options;
}

template <typename Error, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& message, const std::string& part) { return message.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("capacity is there at once, extents are aligned and add up") {
  const auto arena = make_arena(options_of(10 * kMiB + 1));
  auto stats = arena->stats();
  CHECK(stats.limit == 10 * kMiB + kPage);
  CHECK(stats.mapped == stats.limit);
  CHECK(stats.largest_free == stats.limit);
  CHECK(stats.slabs == 1);
  CHECK(stats.pinned == 0);
  CHECK(stats.pin_failure.empty());
  const auto first = arena->allocate(1);
  const auto second = arena->allocate(3 * kMiB + 5);
  CHECK(first->bytes() == kPage);
  CHECK(second->bytes() == 3 * kMiB + kPage);
  for (const auto& extent : {first, second}) {
    CHECK(reinterpret_cast<std::uintptr_t>(extent->data()) % kPage == 0);
    std::memset(extent->data(), 0x5A, extent->bytes());
  }
  stats = arena->stats();
  CHECK(stats.used == first->bytes() + second->bytes());
  CHECK(stats.free == stats.mapped - stats.used);
  CHECK(stats.extents == 2);
}

TEST_CASE("zero bytes hold nothing") {
  const auto arena = make_arena(options_of(kMiB));
  const auto extent = arena->allocate(0);
  CHECK(extent->bytes() == 0);
  CHECK(extent->data() == nullptr);
  CHECK(arena->stats().extents == 0);
  CHECK(make_arena(options_of(0))->allocate(0)->bytes() == 0);
}

TEST_CASE("every page is there before make_arena returns") {
  for (const bool huge_pages : {true, false}) {
    CAPTURE(huge_pages);
    ArenaOptions options = options_of(70 * kMiB + 3 * kPage);
    options.huge_pages = huge_pages;
    options.prefault_threads = 3;
    const std::size_t before = resident_bytes();
    const auto arena = make_arena(options);
    CHECK(resident_bytes() >= before + options.capacity - kMiB);
    const auto all = arena->allocate(options.capacity);
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    CHECK(resident_pages(all->data(), all->bytes()) == (all->bytes() + page - 1) / page);
    if (huge_pages) {
      CHECK(reinterpret_cast<std::uintptr_t>(all->data()) % (2 * kMiB) == 0);
    }
  }
}

TEST_CASE("close gives the memory back") {
  const std::size_t before = resident_bytes();
  const auto arena = make_arena(options_of(96 * kMiB));
  std::shared_ptr<Extent> extent = arena->allocate(kMiB);
  CHECK(resident_bytes() > before + 90 * kMiB);
  SUBCASE("at once, where no extent is alive") {
    extent.reset();
    arena->close();
  }
  SUBCASE("with the last extent") {
    auto copy = extent;
    arena->close();
    CHECK(resident_bytes() > before + 90 * kMiB);
    std::memset(extent->data(), 1, extent->bytes());
    extent.reset();
    CHECK(resident_bytes() > before + 90 * kMiB);
    copy.reset();
  }
  CHECK(resident_bytes() < before + kNoise);
  CHECK(arena->stats().mapped == 0);
  CHECK(arena->stats().slabs == 0);
  CHECK(has(message_of<shardsnap::SnapshotError>([&] { (void)arena->allocate(1); }), "closed"));
  CHECK_THROWS_AS((void)arena->allocate(0), shardsnap::SnapshotError);
  arena->close();
}

TEST_CASE("an extent outlives its arena") {
  const auto pinner = std::make_shared<CountingPinner>();
  ArenaOptions options = options_of(4 * kMiB);
  options.pinner = pinner;
  auto arena = make_arena(options);
  auto extent = arena->allocate(kMiB);
  arena.reset();
  CHECK(pinner->pinned.size() == 1);
  std::memset(extent->data(), 7, extent->bytes());
  extent.reset();
  CHECK(pinner->pinned.empty());
}

TEST_CASE("growth: extra slabs come on demand and go with their last extent") {
  const auto pinner = std::make_shared<CountingPinner>();
  ArenaOptions options = options_of(4 * kMiB, 24 * kMiB);
  options.pinner = pinner;
  const auto arena = make_arena(options);
  const auto whole_capacity = arena->allocate(4 * kMiB);
  CHECK(arena->stats().slabs == 1);
  const std::size_t before = resident_bytes();
  auto first = arena->allocate(6 * kMiB);
  auto second = arena->allocate(6 * kMiB);
  CHECK(arena->stats().slabs == 2);
  CHECK(arena->stats().mapped == 28 * kMiB);
  CHECK(arena->stats().pinned == 28 * kMiB);
  first.reset();
  CHECK(arena->stats().slabs == 2);
  second.reset();
  CHECK(arena->stats().slabs == 1);
  CHECK(arena->stats().mapped == 4 * kMiB);
  CHECK(resident_bytes() < before + kNoise);
  CHECK(pinner->pins == 2);
  CHECK(pinner->pinned.size() == 1);
}

TEST_CASE("growth: no slab is larger than what growth leaves, and a capacity of zero works") {
  const auto arena = make_arena(options_of(0, 3 * kMiB + 1));
  CHECK(arena->stats().slabs == 0);
  CHECK(arena->stats().limit == 3 * kMiB + kPage);
  auto extent = arena->allocate(3 * kMiB + 1);
  CHECK(arena->stats().mapped == 3 * kMiB + kPage);
  CHECK_THROWS_AS((void)arena->allocate(1), ArenaFullError);
  extent.reset();
  CHECK(arena->stats().slabs == 0);
  CHECK(arena->allocate(1)->bytes() == kPage);
}

TEST_CASE("best fit looks at all slabs") {
  const auto arena = make_arena(options_of(8 * kMiB, 300 * kPage));
  auto filler = arena->allocate(8 * kMiB);
  const auto extra = arena->allocate(290 * kPage);
  filler.reset();
  REQUIRE(arena->stats().slabs == 2);
  const auto small = arena->allocate(9 * kPage);
  CHECK(small->data() == extra->data() + extra->bytes());
}

TEST_CASE("a full arena says so with the numbers, and nothing has changed") {
  const auto arena = make_arena(options_of(4 * kMiB));
  SUBCASE("too little is free") {
    const auto held = arena->allocate(3 * kMiB);
    try {
      (void)arena->allocate(2 * kMiB);
      FAIL("it did not throw");
    } catch (const ArenaFullError& error) {
      CHECK(error.asked() == 2 * kMiB);
      CHECK(error.free() == kMiB);
      CHECK(error.largest_free() == kMiB);
      CHECK(has(error.what(), "2.00 MiB (2097152 bytes)"));
      CHECK(has(error.what(), "limit of 4.00 MiB"));
      CHECK(has(error.what(), "Drop a snapshot"));
      CHECK_FALSE(has(error.what(), "fragmented"));
    }
    CHECK(arena->stats().used == 3 * kMiB);
  }
  SUBCASE("enough is free, but in pieces") {
    auto left = arena->allocate(kMiB);
    const auto middle = arena->allocate(2 * kMiB);
    const auto right = arena->allocate(kMiB);
    left.reset();
    auto gone = arena->allocate(kMiB / 2);
    gone.reset();
    const std::string enough = message_of<ArenaFullError>([&] { (void)arena->allocate(kMiB + 1); });
    CHECK_FALSE(has(enough, "fragmented"));
  }
  SUBCASE("fragmented") {
    auto left = arena->allocate(kMiB);
    const auto middle = arena->allocate(2 * kMiB);
    auto right = arena->allocate(kMiB);
    left.reset();
    right.reset();
    CHECK(has(message_of<ArenaFullError>([&] { (void)arena->allocate(2 * kMiB); }), "fragmented"));
    CHECK(arena->stats().largest_free == kMiB);
  }
  SUBCASE("a size that cannot be rounded") {
    CHECK_THROWS_AS((void)arena->allocate(static_cast<std::size_t>(-1)), ArenaFullError);
  }
}

TEST_CASE("what the host has no room for is refused before memory is touched") {
  const std::size_t too_much = shardsnap::MemoryLimits().room().available * 10;
  const std::size_t before = resident_bytes();
  SUBCASE("as capacity") {
    const std::string message = message_of<ArenaFullError>([&] { (void)make_arena(options_of(too_much)); });
    CHECK(has(message, "MemAvailable is"));
    CHECK(has(message, "kept for the rest of the process"));
  }
  SUBCASE("as growth") {
    const auto arena = make_arena(options_of(kMiB, too_much));
    try {
      (void)arena->allocate(too_much);
      FAIL("it did not throw");
    } catch (const ArenaFullError& error) {
      CHECK(error.asked() == too_much);
      CHECK(error.free() == kMiB);
      CHECK(has(error.what(), "the host does not"));
      CHECK(has(error.what(), "MemAvailable is"));
    }
    CHECK(arena->stats().slabs == 1);
    CHECK(arena->allocate(kMiB)->bytes() == kMiB);
  }
  SUBCASE("any number") {
    CHECK_THROWS_AS((void)make_arena(options_of(static_cast<std::size_t>(-1), static_cast<std::size_t>(-1))),
                    ArenaFullError);
  }
  CHECK(resident_bytes() < before + kNoise);
}

TEST_CASE("pin modes") {
  ArenaOptions options = options_of(2 * kMiB, 2 * kMiB);
  SUBCASE("prefer, and the driver refuses: unpinned, with the reason") {
    options.pinner = std::make_shared<RefusingPinner>();
    const auto arena = make_arena(options);
    CHECK(arena->stats().pinned == 0);
    CHECK(has(arena->stats().pin_failure, "driver says no (error 801)"));
    CHECK(arena->allocate(kMiB)->bytes() == kMiB);
  }
  SUBCASE("require, and the driver refuses: an error that helps, and no memory kept") {
    options.pinner = std::make_shared<RefusingPinner>();
    options.pin = PinMode::kRequire;
    options.capacity = 64 * kMiB;
    const std::size_t before = resident_bytes();
    const std::string message = message_of<PinningError>([&] { (void)make_arena(options); });
    CAPTURE(message);
    CHECK(has(message, "driver says no (error 801)"));
    CHECK(has(message, "RLIMIT_MEMLOCK is"));
    CHECK(has(message, "MemAvailable is"));
    CHECK(has(message, "ulimit -l"));
    CHECK(resident_bytes() < before + kNoise);
  }
  SUBCASE("require, and a growth slab is refused") {
    options.pinner = std::make_shared<RefusingPinner>();
    options.pin = PinMode::kRequire;
    options.capacity = 0;
    const auto arena = make_arena(options);
    CHECK_THROWS_AS((void)arena->allocate(1), PinningError);
    CHECK(arena->stats().slabs == 0);
  }
  SUBCASE("require without a pinner") {
    options.pin = PinMode::kRequire;
    CHECK_THROWS_AS((void)make_arena(options), PinningError);
  }
  SUBCASE("never") {
    const auto pinner = std::make_shared<CountingPinner>();
    options.pinner = pinner;
    options.pin = PinMode::kNever;
    CHECK(make_arena(options)->stats().pinned == 0);
    CHECK(pinner->pins == 0);
  }
  SUBCASE("pins and unpins are balanced") {
    const auto pinner = std::make_shared<CountingPinner>();
    options.pinner = pinner;
    options.pin = PinMode::kRequire;
    const auto arena = make_arena(options);
    CHECK(pinner->pinned.begin()->second == 2 * kMiB);
    const auto first = arena->allocate(2 * kMiB);
    const auto second = arena->allocate(kMiB);
    CHECK(pinner->pinned.size() == 2);
    arena->close();
    CHECK(pinner->pinned.size() == 2);
  }
}

TEST_CASE("a NUMA node that cannot be had is not reported as if it were") {
  ArenaOptions options = options_of(kMiB);
  options.numa_node = 3000;
  CHECK(make_arena(options)->stats().numa_node == -1);
  options.numa_node = -7;
  CHECK(make_arena(options)->stats().numa_node == -1);
}

TEST_CASE("prefault stops when room runs out meanwhile") {
  constexpr std::size_t bytes = 128 * kMiB;
  const std::size_t before = resident_bytes();
  {
    HostBlock block(bytes, -1, true);
    std::atomic<int> checks{0};
    const auto no_room = [&](std::size_t remaining) {
      CHECK(remaining == bytes);
      ++checks;
      throw ArenaFullError("gone", remaining, 0, 0);
    };
    CHECK_THROWS_AS(block.prefault(1, no_room), ArenaFullError);
    CHECK(checks == 1);
    CHECK(resident_bytes() < before + kNoise);
    CHECK_THROWS_AS(block.prefault(4, no_room), ArenaFullError);
  }
  CHECK(resident_bytes() < before + kNoise);
}

TEST_CASE("pages are touched by hand where the kernel cannot populate") {
  const HostBlock block(kMiB, -1, false);
  CHECK(resident_pages(block.data(), block.bytes()) == 0);
  shardsnap::touch_pages(block.data(), block.bytes());
  CHECK(resident_pages(block.data(), block.bytes()) == kMiB / static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
}

TEST_CASE("a child of fork has no slab, and destroying the arena there harms nothing") {
  const auto pinner = std::make_shared<CountingPinner>();
  ArenaOptions options = options_of(4 * kMiB, 4 * kMiB);
  options.pinner = pinner;
  auto arena = make_arena(options);
  auto extent = arena->allocate(4 * kMiB);
  auto extra = arena->allocate(kMiB);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::byte* address = extent->data();
    const bool absent = !mapped_here(address);
    void* other = mmap(address, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    extra.reset();
    extent.reset();
    arena.reset();
    _exit(absent && other == address && mapped_here(address) && pinner->pinned.size() == 2 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  std::memset(extent->data(), 1, extent->bytes());
}

TEST_CASE("threads share an arena") {
  const auto arena = make_arena(options_of(8 * kMiB, 8 * kMiB));
  std::atomic<int> overlaps{0};
  const auto worker = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::pair<std::shared_ptr<Extent>, std::byte>> held;
    for (int step = 0; step < 400; ++step) {
      if (!held.empty() && random() % 2 == 0) {
        const auto [extent, mark] = held.back();
        held.pop_back();
        overlaps += *extent->data() != mark || *(extent->data() + extent->bytes() - 1) != mark ? 1 : 0;
        continue;
      }
      try {
        auto extent = arena->allocate(1 + random() % kMiB);
        const auto mark = static_cast<std::byte>(random());
        std::memset(extent->data(), static_cast<int>(mark), extent->bytes());
        held.emplace_back(std::move(extent), mark);
      } catch (const ArenaFullError&) {
        held.clear();
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    threads.emplace_back(worker, seed);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(overlaps == 0);
  CHECK(arena->stats().used == 0);
  CHECK(arena->stats().mapped == 8 * kMiB);
}
