// How the arena pins a slab, without knowing by whom.
#pragma once

#include <cstddef>

namespace shardsnap {

class HostPinner {
 public:
  HostPinner() = default;
  virtual ~HostPinner() = default;
  HostPinner(const HostPinner&) = delete;
  HostPinner& operator=(const HostPinner&) = delete;

  // Pins [address, address + bytes), blocking. Throws PinningError.
  virtual void pin(void* address, std::size_t bytes) = 0;
  virtual void unpin(void* address) noexcept = 0;
};

}  // namespace shardsnap
