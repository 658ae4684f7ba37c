// Packing and plans, checked byte by byte against a model that knows nothing of ranges.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "device/copy_device.hpp"
#include "engine/copy_plan.hpp"

namespace {

using shardsnap::CopyPlan;
using shardsnap::CopyRange;
using shardsnap::HostPacking;
using shardsnap::pack_regions;

constexpr std::size_t kNoChunks = std::numeric_limits<std::size_t>::max();
constexpr std::uintptr_t kBase = 0x7f0000000000;

// The arguments of a plan, range by range.
struct Ranges {
  std::vector<std::uintptr_t> addresses;
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> bytes;

  void add(std::uintptr_t address, std::size_t offset, std::size_t size) {
    addresses.push_back(address);
    offsets.push_back(offset);
    bytes.push_back(size);
  }

  [[nodiscard]] CopyPlan plan(std::size_t chunk_bytes = kNoChunks) const {
    return {addresses, offsets, bytes, chunk_bytes};
  }
};

// Which host byte each device byte belongs to; empty where a device byte would belong to two.
struct ByteMap {
  std::map<std::uintptr_t, std::size_t> host_of;
  bool consistent = true;

  explicit ByteMap(const Ranges& ranges) {
    for (std::size_t index = 0; index < ranges.addresses.size(); ++index) {
      for (std::size_t byte = 0; byte < ranges.bytes[index]; ++byte) {
        const auto placed = host_of.emplace(ranges.addresses[index] + byte, ranges.offsets[index] + byte);
        consistent = consistent && placed.first->second == ranges.offsets[index] + byte;
      }
    }
  }

  // How many ranges a plan needs: one for each run that is without a gap on both sides, cut into chunks.
  [[nodiscard]] std::size_t fewest_ranges(std::size_t chunk_bytes) const {
    std::size_t ranges = 0;
    std::size_t run = 0;
    std::pair<std::uintptr_t, std::size_t> previous{0, 0};
    for (const auto& [device, host] : host_of) {
      const bool continues = run != 0 && device == previous.first + 1 && host == previous.second + 1;
      run = continues && run < chunk_bytes ? run + 1 : 1;
      ranges += run == 1 ? 1 : 0;
      previous = {device, host};
    }
    return ranges;
  }

  [[nodiscard]] std::size_t host_end() const {
    std::size_t end = 0;
    for (const auto& [device, host] : host_of) {
      end = std::max(end, host + 1);
    }
    return end;
  }
};

// Every byte of the model is copied exactly once, to where it belongs, and nothing else is.
void check_plan(const CopyPlan& plan, const ByteMap& model, std::size_t chunk_bytes) {
  std::map<std::uintptr_t, std::size_t> copied;
  std::size_t twice = 0;
  for (const CopyRange& range : *plan.ranges()) {
    CHECK(range.bytes > 0);
    CHECK(range.bytes <= chunk_bytes);
    for (std::size_t byte = 0; byte < range.bytes; ++byte) {
      twice += copied.emplace(range.device + byte, range.host_offset + byte).second ? 0 : 1;
    }
  }
  CHECK(twice == 0);
  CHECK((copied == model.host_of));
  CHECK(plan.bytes() == model.host_of.size());
  CHECK(plan.host_bytes() == model.host_end());
  CHECK(plan.ranges()->size() == model.fewest_ranges(chunk_bytes));
}

// Regions that do not overlap, in any order: `gap` and `size` say how far apart and how long they are.
template <typename Gap, typename Size>
Ranges regions(std::mt19937_64& engine, std::size_t count, Gap gap, Size size) {
  std::vector<std::pair<std::uintptr_t, std::size_t>> found;
  std::uintptr_t address = kBase + engine() % 128;
  for (std::size_t index = 0; index < count; ++index) {
    address += gap();
    found.emplace_back(address, size());
    address += found.back().second;
  }
  std::shuffle(found.begin(), found.end(), engine);
  Ranges ranges;
  for (const auto& [start, bytes] : found) {
    ranges.add(start, 0, bytes);
  }
  return ranges;
}

HostPacking pack(Ranges& ranges) {
  HostPacking packing = pack_regions(ranges.addresses, ranges.bytes);
  ranges.offsets = packing.offsets;
  return packing;
}

// What pack_regions() promises, but for the overhead.
void check_packing(const Ranges& ranges, const HostPacking& packing) {
  REQUIRE(packing.offsets.size() == ranges.addresses.size());
  std::vector<std::size_t> order(ranges.addresses.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t left, std::size_t right) { return ranges.addresses[left] < ranges.addresses[right]; });
  std::uintptr_t device_end = 0;
  std::size_t host_end = 0;
  std::size_t misplaced = 0;
  for (const std::size_t index : order) {
    if (ranges.bytes[index] == 0) {
      continue;
    }
    const std::size_t offset = packing.offsets[index];
    if (device_end != 0 && ranges.addresses[index] == device_end) {
      misplaced += offset == host_end ? 0 : 1;
    } else {
      const std::size_t alignment = ranges.bytes[index] >= 8192 ? 64 : 16;
      const bool near = offset >= host_end && offset < host_end + alignment;
      misplaced += near && (ranges.addresses[index] - offset) % alignment == 0 ? 0 : 1;
    }
    device_end = ranges.addresses[index] + ranges.bytes[index];
    host_end = offset + ranges.bytes[index];
  }
  CHECK(misplaced == 0);
  CHECK(packing.bytes == host_end);
}

std::size_t sum(const std::vector<std::size_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
}

}  // namespace

TEST_SUITE("packing") {
  TEST_CASE("random regions keep their order, their neighbours and their alignment") {
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
      CAPTURE(seed);
      std::mt19937_64 engine(seed);
      const auto gap = [&] { return engine() % 3 == 0 ? 0 : engine() % 200; };
      const auto size = [&] { return engine() % 4 == 0 ? engine() % 20000 : engine() % 40; };
      Ranges ranges = regions(engine, engine() % 60, gap, size);
      check_packing(ranges, pack(ranges));
    }
  }

  TEST_CASE("at most 1% is lost for regions of 4 KiB and more") {
    std::mt19937_64 engine(1);
    const auto worst_size = [] { return std::size_t{4097}; };
    const auto worst_wide_size = [] { return std::size_t{8193}; };
    const auto any_size = [&] { return 4096 + engine() % 8192; };
    const auto to_boundary = [](std::size_t size) { return 64 - size % 64; };
    const auto check = [&](Ranges ranges) {
      const HostPacking packing = pack(ranges);
      check_packing(ranges, packing);
      CHECK(packing.bytes >= sum(ranges.bytes));
      CHECK(static_cast<double>(packing.bytes - sum(ranges.bytes)) <= 0.01 * static_cast<double>(sum(ranges.bytes)));
    };
    check(regions(
        engine, 10000, [&] { return to_boundary(4097); }, worst_size));
    check(regions(
        engine, 10000, [&] { return to_boundary(8193); }, worst_wide_size));
    check(regions(
        engine, 10000, [&] { return 1 + engine() % 512; }, any_size));
  }

  TEST_CASE("nothing, and regions of no bytes") {
    CHECK(pack_regions({}, {}).bytes == 0);
    const HostPacking packing = pack_regions({kBase, kBase + 5, kBase}, {0, 0, 100});
    CHECK(packing.bytes == 100);
    CHECK(packing.offsets == std::vector<std::size_t>{0, 0, 0});
    CHECK(pack_regions({0, 0}, {0, 0}).bytes == 0);
  }

  TEST_CASE("overlap is refused") {
    CHECK_THROWS_AS(pack_regions({kBase, kBase + 99}, {100, 1}), std::invalid_argument);
    CHECK_THROWS_AS(pack_regions({kBase, kBase}, {1, 1}), std::invalid_argument);
    CHECK_THROWS_AS(pack_regions({kBase + 50, kBase}, {10, 51}), std::invalid_argument);
    CHECK_NOTHROW(pack_regions({kBase, kBase + 100}, {100, 1}));
    CHECK_NOTHROW(pack_regions({kBase, kBase + 50}, {100, 0}));  // no byte of it is shared
  }

  TEST_CASE("arguments of different lengths are refused") {
    CHECK_THROWS_AS(pack_regions({kBase}, {}), std::invalid_argument);
    CHECK_THROWS_AS(pack_regions({}, {1}), std::invalid_argument);
  }
}

TEST_SUITE("copy plan") {
  TEST_CASE("a plan of packed regions") {
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
      CAPTURE(seed);
      std::mt19937_64 engine(seed);
      const auto gap = [&] { return engine() % 2 == 0 ? 0 : engine() % 100; };
      Ranges ranges = regions(engine, engine() % 40, gap, [&] { return engine() % 60; });
      pack(ranges);
      const ByteMap model(ranges);
      REQUIRE(model.consistent);
      const std::size_t chunk_bytes = engine() % 4 == 0 ? kNoChunks : 1 + engine() % 70;
      check_plan(ranges.plan(chunk_bytes), model, chunk_bytes);
    }
  }

  TEST_CASE("any ranges: those that agree are merged, the others refused") {
    std::size_t refused = 0;
    for (std::uint64_t seed = 0; seed < 3000; ++seed) {
      CAPTURE(seed);
      std::mt19937_64 engine(seed);
      const bool shifted = engine() % 2 == 0;
      Ranges ranges;
      for (std::size_t count = engine() % 20; count > 0; --count) {
        const std::size_t at = engine() % 400;
        // Far above the other host bytes of `at`, so that shifts meet on the device, never on the host.
        const std::size_t shift = shifted && engine() % 8 == 0 ? 1000 * (1 + engine() % 2) : 0;
        ranges.add(kBase + at, at + shift, engine() % 5 == 0 ? 0 : engine() % 50);
        if (engine() % 4 == 0) {
          ranges.add(ranges.addresses.back(), ranges.offsets.back(), ranges.bytes.back());
        }
      }
      const ByteMap model(ranges);
      const std::size_t chunk_bytes = engine() % 4 == 0 ? kNoChunks : 1 + engine() % 70;
      if (model.consistent) {
        check_plan(ranges.plan(chunk_bytes), model, chunk_bytes);
      } else {
        CHECK_THROWS_AS(ranges.plan(chunk_bytes), std::invalid_argument);
        ++refused;
      }
    }
    CHECK(refused > 500);
    CHECK(refused < 2500);
  }

  TEST_CASE("ranges that touch on one side only stay apart") {
    Ranges on_device;
    on_device.add(kBase, 0, 10);
    on_device.add(kBase + 10, 11, 10);
    CHECK(on_device.plan().ranges()->size() == 2);
    Ranges on_host;
    on_host.add(kBase, 0, 10);
    on_host.add(kBase + 11, 10, 10);
    CHECK(on_host.plan().ranges()->size() == 2);
    Ranges on_both;
    on_both.add(kBase + 10, 10, 10);
    on_both.add(kBase, 0, 10);
    CHECK(on_both.plan().ranges()->size() == 1);
  }

  TEST_CASE("chunks") {
    Ranges ranges;
    ranges.add(kBase, 7, 100);
    for (const auto& chunks : std::vector<std::pair<std::size_t, std::size_t>>{
             {1, 100}, {33, 4}, {50, 2}, {99, 2}, {100, 1}, {101, 1}, {kNoChunks, 1}}) {
      const std::size_t chunk_bytes = chunks.first;
      CAPTURE(chunk_bytes);
      const CopyPlan plan = ranges.plan(chunk_bytes);
      CHECK(plan.ranges()->size() == chunks.second);
      check_plan(plan, ByteMap(ranges), chunk_bytes);
    }
    CHECK_THROWS_AS(ranges.plan(0), std::invalid_argument);
  }

  TEST_CASE("nothing to copy") {
    CHECK(Ranges().plan().ranges()->empty());
    Ranges ranges;
    ranges.add(kBase, 1 << 20, 0);
    const CopyPlan plan = ranges.plan(1);
    CHECK(plan.ranges()->empty());
    CHECK(plan.bytes() == 0);
    CHECK(plan.host_bytes() == 0);
  }

  TEST_CASE("arguments of different lengths are refused") {
    CHECK_THROWS_AS(CopyPlan({kBase}, {}, {1}, 1), std::invalid_argument);
    CHECK_THROWS_AS(CopyPlan({kBase}, {0}, {}, 1), std::invalid_argument);
    CHECK_THROWS_AS(CopyPlan({}, {0}, {1}, 1), std::invalid_argument);
  }

  TEST_CASE("ten thousand regions") {
    std::mt19937_64 engine(3);
    const auto gap = [&] { return engine() % 4 == 0 ? 512 : 0; };
    Ranges ranges = regions(engine, 10000, gap, [&] { return 1 + engine() % 300; });
    const HostPacking packing = pack(ranges);
    check_packing(ranges, packing);
    const ByteMap model(ranges);
    REQUIRE(model.consistent);
    for (const std::size_t chunk_bytes : {std::size_t{128}, kNoChunks}) {
      check_plan(ranges.plan(chunk_bytes), model, chunk_bytes);
    }
    CHECK(ranges.plan().ranges()->size() < 3000);  // of the 10,000, three in four touch their neighbour
    CHECK(ranges.plan().host_bytes() == packing.bytes);
  }
}
