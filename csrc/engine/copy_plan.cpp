#include "engine/copy_plan.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardsnap {
namespace {

constexpr std::size_t kWideAlignment = 64;
constexpr std::size_t kNarrowAlignment = 16;
constexpr std::size_t kWideRegionBytes = 8192;  // 63 bytes before one are less than 1% of it

// Without this a sort of ten thousand regions would move them instead of their indices.
std::vector<std::size_t> order_by_address(const std::vector<std::uintptr_t>& addresses) {
  std::vector<std::size_t> order(addresses.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t left, std::size_t right) { return addresses[left] < addresses[right]; });
  return order;
}

// The first offset from `cursor` on that agrees with `address` modulo the alignment.
std::size_t align_like(std::size_t cursor, std::uintptr_t address, std::size_t bytes) {
  const std::size_t alignment = bytes >= kWideRegionBytes ? kWideAlignment : kNarrowAlignment;
  return cursor + (address - cursor) % alignment;
}

void require_same_length(std::size_t left, std::size_t right) {
  if (left != right) {
    throw std::invalid_argument("a plan needs as many sizes and offsets as addresses, got " + std::to_string(left) +
                                " and " + std::to_string(right));
  }
}

std::vector<CopyRange> coalesce(const std::vector<std::uintptr_t>& addresses, const std::vector<std::size_t>& offsets,
                                const std::vector<std::size_t>& bytes) {
  std::vector<CopyRange> runs;
  runs.reserve(addresses.size());
  for (const std::size_t index : order_by_address(addresses)) {
    const CopyRange next{addresses[index], offsets[index], bytes[index]};
    if (next.bytes == 0) {
      continue;
    }
    if (!runs.empty()) {
      CopyRange& run = runs.back();
      const std::size_t distance = next.device - run.device;
      const bool same_shift = next.host_offset == run.host_offset + distance;
      if (distance < run.bytes && !same_shift) {
        throw std::invalid_argument("range " + std::to_string(index) +
                                    " shares device bytes with another range but not its host bytes");
      }
      if (distance <= run.bytes && same_shift) {
        run.bytes = std::max(run.bytes, distance + next.bytes);
        continue;
      }
    }
    runs.push_back(next);
  }
  return runs;
}

std::vector<CopyRange> split(const std::vector<CopyRange>& runs, std::size_t chunk_bytes) {
  std::vector<CopyRange> chunks;
  chunks.reserve(runs.size());
  for (const CopyRange& run : runs) {
    for (std::size_t done = 0; done < run.bytes; done += chunk_bytes) {
      chunks.push_back({run.device + done, run.host_offset + done, std::min(chunk_bytes, run.bytes - done)});
    }
  }
  return chunks;
}

}  // namespace

HostPacking pack_regions(const std::vector<std::uintptr_t>& addresses, const std::vector<std::size_t>& bytes) {
  require_same_length(addresses.size(), bytes.size());
  HostPacking packing;
  packing.offsets.resize(addresses.size());
  std::uintptr_t previous_end = 0;
  for (const std::size_t index : order_by_address(addresses)) {
    if (bytes[index] == 0) {
      continue;
    }
    if (addresses[index] < previous_end) {
      throw std::invalid_argument("region " + std::to_string(index) + " overlaps another region");
    }
    const bool touches = packing.bytes != 0 && addresses[index] == previous_end;
    packing.offsets[index] = touches ? packing.bytes : align_like(packing.bytes, addresses[index], bytes[index]);
    packing.bytes = packing.offsets[index] + bytes[index];
    previous_end = addresses[index] + bytes[index];
  }
  return packing;
}

CopyPlan::CopyPlan(const std::vector<std::uintptr_t>& addresses, const std::vector<std::size_t>& offsets,
                   const std::vector<std::size_t>& bytes, std::size_t chunk_bytes) {
  require_same_length(addresses.size(), offsets.size());
  require_same_length(addresses.size(), bytes.size());
  if (chunk_bytes == 0) {
    throw std::invalid_argument("a plan needs chunks of at least one byte");
  }
  const std::vector<CopyRange> runs = coalesce(addresses, offsets, bytes);
  for (const CopyRange& run : runs) {
    bytes_ += run.bytes;
    host_bytes_ = std::max(host_bytes_, run.host_offset + run.bytes);
  }
  ranges_ = std::make_shared<const std::vector<CopyRange>>(split(runs, chunk_bytes));
}

}  // namespace shardsnap
