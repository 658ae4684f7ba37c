#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "memory/extent_allocator.hpp"

namespace {

using shardsnap::ExtentAllocator;
using shardsnap::kExtentGranularity;

constexpr std::size_t kPage = kExtentGranularity;

// The same allocator, one flag per page, with nothing clever in it.
class BitmapModel {
 public:
  explicit BitmapModel(std::size_t pages) : taken_(pages, false) {}

  std::optional<std::size_t> allocate(std::size_t pages) {
    std::optional<std::size_t> best;
    std::size_t best_length = 0;
    for (const auto& [first, length] : free_runs()) {
      if (length >= pages && (!best || length < best_length)) {
        best = first;
        best_length = length;
      }
    }
    if (best) {
      mark(*best, pages, true);
    }
    return best;
  }

  void release(std::size_t first, std::size_t pages) { mark(first, pages, false); }

  [[nodiscard]] std::size_t largest_free() const {
    std::size_t largest = 0;
    for (const auto& [first, length] : free_runs()) {
      largest = std::max(largest, length);
    }
    return largest;
  }

  [[nodiscard]] std::size_t used() const {
    return static_cast<std::size_t>(std::count(taken_.begin(), taken_.end(), true));
  }

 private:
  [[nodiscard]] std::vector<std::pair<std::size_t, std::size_t>> free_runs() const {
    std::vector<std::pair<std::size_t, std::size_t>> runs;
    for (std::size_t page = 0; page < taken_.size(); ++page) {
      if (taken_[page]) {
        continue;
      }
      if (runs.empty() || runs.back().first + runs.back().second != page) {
        runs.emplace_back(page, 0);
      }
      ++runs.back().second;
    }
    return runs;
  }

  void mark(std::size_t first, std::size_t pages, bool taken) {
    for (std::size_t page = first; page < first + pages; ++page) {
      REQUIRE(taken_[page] != taken);
      taken_[page] = taken;
    }
  }

  std::vector<bool> taken_;
};

void run_model_test(std::uint32_t seed) {
  constexpr std::size_t pages = 300;
  constexpr int steps = 1500;
  std::mt19937 random(seed);
  ExtentAllocator allocator(pages * kPage);
  BitmapModel model(pages);
  std::vector<std::pair<std::size_t, std::size_t>> held;  // (first page, pages)
  for (int step = 0; step < steps; ++step) {
    const bool release = !held.empty() && random() % 100 < 48;
    if (release) {
      std::swap(held[random() % held.size()], held.back());
      const auto [first, length] = held.back();
      held.pop_back();
      model.release(first, length);
      REQUIRE(allocator.release(first * kPage));
    } else {
      const std::size_t bytes = 1 + random() % (random() % 8 == 0 ? 80 * kPage : 8 * kPage);
      const std::size_t length = (bytes + kPage - 1) / kPage;
      const auto expected = model.allocate(length);
      const auto offset = allocator.allocate(bytes);
      REQUIRE(offset.has_value() == expected.has_value());
      if (offset) {
        REQUIRE(*offset == *expected * kPage);
        held.emplace_back(*expected, length);
      }
    }
    REQUIRE(allocator.used() == model.used() * kPage);
    REQUIRE(allocator.largest_free() == model.largest_free() * kPage);
  }
  for (const auto& [first, length] : held) {
    REQUIRE(allocator.release(first * kPage));
  }
  CHECK(allocator.used() == 0);
  CHECK(allocator.allocate(pages * kPage) == 0);
}

}  // namespace

TEST_CASE("the allocator does what a bitmap does") {
  for (const std::uint32_t seed : {1U, 2U, 3U, 20240229U}) {
    CAPTURE(seed);
    run_model_test(seed);
  }
}

TEST_CASE("best fit takes the smallest free range that is large enough") {
  ExtentAllocator allocator(16 * kPage);
  const auto large_gap = allocator.allocate(4 * kPage);
  const auto wall = allocator.allocate(kPage);
  const auto small_gap = allocator.allocate(2 * kPage);
  REQUIRE(allocator.allocate(kPage) == 7 * kPage);
  REQUIRE((large_gap && wall && small_gap));
  allocator.release(*large_gap);
  allocator.release(*small_gap);
  CHECK(allocator.best_fit(2 * kPage) == 2 * kPage);
  CHECK(allocator.allocate(2 * kPage) == *small_gap);
  CHECK(allocator.allocate(3 * kPage) == *large_gap);
}

TEST_CASE("free neighbours become one range, in whatever order they are freed") {
  std::vector<std::size_t> order{0, 1, 2, 3};
  do {
    ExtentAllocator allocator(4 * kPage);
    for (std::size_t page = 0; page < 4; ++page) {
      REQUIRE(allocator.allocate(kPage) == page * kPage);
    }
    CHECK(allocator.largest_free() == 0);
    for (const std::size_t page : order) {
      CHECK(allocator.release(page * kPage));
    }
    CHECK(allocator.largest_free() == 4 * kPage);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("what was not taken is not released") {
  ExtentAllocator allocator(8 * kPage);
  REQUIRE(allocator.allocate(2 * kPage) == 0);
  CHECK_FALSE(allocator.release(kPage));
  CHECK_FALSE(allocator.release(2 * kPage));
  CHECK_FALSE(allocator.release(100 * kPage));
  CHECK(allocator.used() == 2 * kPage);
  CHECK(allocator.release(0));
  CHECK_FALSE(allocator.release(0));
}

TEST_CASE("sizes at the edges") {
  SUBCASE("nothing to give") {
    ExtentAllocator allocator(0);
    CHECK(allocator.largest_free() == 0);
    CHECK_FALSE(allocator.allocate(1).has_value());
  }
  SUBCASE("a size below the granularity holds nothing") { CHECK(ExtentAllocator(kPage - 1).size() == 0); }
  SUBCASE("zero bytes take nothing") {
    ExtentAllocator allocator(kPage);
    CHECK_FALSE(allocator.allocate(0).has_value());
    CHECK_FALSE(allocator.best_fit(0).has_value());
  }
  SUBCASE("one byte takes a page") {
    ExtentAllocator allocator(2 * kPage);
    CHECK(allocator.allocate(1) == 0);
    CHECK(allocator.used() == kPage);
  }
  SUBCASE("a size that cannot be rounded up does not fit anywhere") {
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    ExtentAllocator allocator(most);
    CHECK_FALSE(allocator.allocate(most).has_value());
    CHECK(allocator.allocate(most - kPage) == 0);
    CHECK(shardsnap::round_to_granularity(most) == most - kPage + 1);
  }
}
