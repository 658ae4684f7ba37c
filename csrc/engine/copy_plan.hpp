// The copy plan: which device bytes go to which offsets of a snapshot, coalesced and chunked once per layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/copy_device.hpp"

namespace shardsnap {

struct HostPacking {
  std::vector<std::size_t> offsets;  // per region, in the order given
  std::size_t bytes = 0;             // from the first byte to the last
};

// Lays regions out on the host in order of device address. Regions that touch on the device touch on the host; others
// start at an offset that agrees with the device address modulo 64 (16 for regions under 8 KiB), so that both sides of
// a copy are aligned alike and at most 1% is lost where regions have 4 KiB or more. Throws std::invalid_argument if two
// regions overlap or the sizes of the arguments differ.
HostPacking pack_regions(const std::vector<std::uintptr_t>& addresses, const std::vector<std::size_t>& bytes);

// Immutable after construction; shared by every snapshot of a layout.
class CopyPlan {
 public:
  // Range i copies bytes[i] between device address addresses[i] and host offset offsets[i]. Ranges that touch on both
  // sides become one, identical and consistently overlapping ones are merged, and runs longer than chunk_bytes are
  // split. Throws std::invalid_argument if one device byte would belong to two host bytes, or chunk_bytes is 0.
  CopyPlan(const std::vector<std::uintptr_t>& addresses, const std::vector<std::size_t>& offsets,
           const std::vector<std::size_t>& bytes, std::size_t chunk_bytes);

  [[nodiscard]] const CopyRanges& ranges() const { return ranges_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  // One past the last host offset that the plan touches.
  [[nodiscard]] std::size_t host_bytes() const { return host_bytes_; }

 private:
  CopyRanges ranges_;
  std::size_t bytes_ = 0;
  std::size_t host_bytes_ = 0;
};

}  // namespace shardsnap
