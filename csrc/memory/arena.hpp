// The arena: prefaulted, pinned slabs of host memory from which snapshots take extents.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "memory/host_pinner.hpp"

namespace shardsnap {

enum class PinMode { kRequire, kPrefer, kNever };

struct ArenaOptions {
  std::size_t capacity = 0;        // bytes mapped, prefaulted and pinned at once; rounded up to 4 KiB
  std::size_t growth = 0;          // further bytes that may be mapped later, in extra slabs, when the arena is full
  int numa_node = -1;              // bind to this node; -1 leaves placement to the kernel
  unsigned prefault_threads = 0;   // 0: one per usable core, at most 16
  bool huge_pages = true;          // MADV_HUGEPAGE
  PinMode pin = PinMode::kPrefer;  // without a pinner, kRequire is a PinningError and kPrefer pins nothing
  std::shared_ptr<HostPinner> pinner;
};

// All sizes in bytes.
struct ArenaStats {
  std::size_t limit = 0;         // capacity + growth
  std::size_t mapped = 0;        // held from the system now
  std::size_t used = 0;          // in extents
  std::size_t free = 0;          // mapped - used
  std::size_t largest_free = 0;  // the largest extent that fits without a new slab
  std::size_t pinned = 0;
  std::size_t slabs = 0;
  std::size_t extents = 0;
  int numa_node = -1;
  std::string pin_failure;  // why nothing is pinned although it was preferred; empty otherwise
};

// A range of a slab. It goes back to the arena when destroyed and keeps its slab mapped until then.
class Extent {
 public:
  Extent() = default;
  virtual ~Extent() = default;
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;

  [[nodiscard]] virtual std::byte* data() const = 0;    // 4 KiB aligned
  [[nodiscard]] virtual std::size_t bytes() const = 0;  // a multiple of 4 KiB, at least what was asked for
};

// Thread-safe.
class Arena {
 public:
  Arena() = default;
  virtual ~Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Best fit over all slabs; maps an extra slab where none fits and growth allows. Throws ArenaFullError with the
  // numbers; nothing has changed then. bytes == 0 gives an extent of 0 bytes that holds no memory.
  [[nodiscard]] virtual std::shared_ptr<Extent> allocate(std::size_t bytes) = 0;

  [[nodiscard]] virtual ArenaStats stats() const = 0;

  // Refuses later allocations and gives back every slab: at once where no extent is alive, else with its last extent.
  virtual void close() noexcept = 0;
};

// Maps, binds, prefaults (several threads) and pins `capacity` bytes before it returns. Throws ArenaFullError, before
// memory is touched, where the cgroup or MemAvailable leaves too little room, and PinningError as PinMode says.
std::shared_ptr<Arena> make_arena(const ArenaOptions& options);

}  // namespace shardsnap
