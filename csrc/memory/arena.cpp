#include "memory/arena.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "errors.hpp"
#include "memory/extent_allocator.hpp"
#include "memory/host_block.hpp"
#include "memory/memory_limits.hpp"

namespace shardsnap {
namespace {

// Mapping and pinning have a cost per call, so small requests share a slab.
constexpr std::size_t kGrowthSlab = std::size_t{256} << 20;

std::size_t saturating_add(std::size_t left, std::size_t right) {
  return left > std::numeric_limits<std::size_t>::max() - right ? std::numeric_limits<std::size_t>::max()
                                                                : left + right;
}

// For numbers that are compared with each other: in GiB alone, what is asked and what is free may look the same.
std::string exact(std::size_t bytes) {
  return bytes < 1024 ? format_bytes(bytes) : format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes)";
}

// Unpins when destroyed.
class PinnedRange {
 public:
  // Throws PinningError under PinMode::kRequire.
  PinnedRange(const HostBlock& block, const ArenaOptions& options, const MemoryLimits& limits) : block_(block) {
    if (options.pin == PinMode::kNever || !options.pinner) {
      return;
    }
    try {
      options.pinner->pin(block.data(), block.bytes());
      pinner_ = options.pinner;
    } catch (const SnapshotError& error) {
      if (options.pin == PinMode::kRequire) {
        throw PinningError("the driver did not pin " + exact(block.bytes()) + " of host memory: " + error.what() +
                           ". " + describe_memlock_limit() + "; " + limits.room().describe() +
                           ". Raise the limit (ulimit -l unlimited, docker run --ulimit memlock=-1) where the driver "
                           "counts against it, ask for a smaller capacity, or let the arena go on unpinned, with "
                           "slower copies.");
      }
      failure_ = error.what();
    }
  }
  ~PinnedRange() {
    // The driver is of no use in a child of fork().
    if (pinner_ && block_.in_owner_process()) {
      pinner_->unpin(block_.data());
    }
  }
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

  [[nodiscard]] bool pinned() const { return pinner_ != nullptr; }
  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  const HostBlock& block_;
  std::shared_ptr<HostPinner> pinner_;
  std::string failure_;
};

enum class SlabKind { kCapacity, kGrowth };

class Slab {
 public:
  Slab(std::size_t bytes, SlabKind kind, const ArenaOptions& options, const MemoryLimits& limits)
      : kind_(kind),
        block_(room_checked(bytes, limits), options.numa_node, options.huge_pages),
        pin_(prefaulted(block_, options, limits), options, limits),
        ranges_(bytes) {}

  [[nodiscard]] SlabKind kind() const { return kind_; }
  [[nodiscard]] const HostBlock& block() const { return block_; }
  [[nodiscard]] const PinnedRange& pin() const { return pin_; }
  [[nodiscard]] const ExtentAllocator& ranges() const { return ranges_; }
  [[nodiscard]] ExtentAllocator& ranges() { return ranges_; }

 private:
  static std::size_t room_checked(std::size_t bytes, const MemoryLimits& limits) {
    limits.check_room(bytes);
    return bytes;
  }
  // Before pinning: the driver would fault the pages in by one thread.
  static const HostBlock& prefaulted(HostBlock& block, const ArenaOptions& options, const MemoryLimits& limits) {
    block.prefault(options.prefault_threads, [&limits](std::size_t remaining) { limits.recheck_room(remaining); });
    return block;
  }

  SlabKind kind_;
  HostBlock block_;
  PinnedRange pin_;  // after block_, so that it unpins before the block is unmapped
  ExtentAllocator ranges_;
};

using Slabs = std::list<Slab>;

// The slabs, shared by the arena and its extents: they outlive the arena as long as an extent does.
class SlabPool : public std::enable_shared_from_this<SlabPool> {
 public:
  explicit SlabPool(ArenaOptions options)
      : options_(std::move(options)), limit_(saturating_add(options_.capacity, options_.growth)) {
    if (options_.capacity > 0) {
      slabs_.emplace_back(options_.capacity, SlabKind::kCapacity, options_, limits_);
    }
  }

  std::shared_ptr<Extent> allocate(std::size_t bytes);
  void release(Slabs::iterator slab, const std::byte* address) noexcept;
  ArenaStats stats() const;
  void close() noexcept;

 private:
  std::shared_ptr<Extent> take(std::size_t bytes);
  std::shared_ptr<Extent> take_from(Slabs& slabs, std::size_t bytes);
  std::shared_ptr<Extent> grow(std::size_t bytes);
  Slabs new_slab(std::size_t bytes, std::size_t growth_left) const;
  [[noreturn]] void throw_full(std::size_t asked, const std::string& host_reason) const;

  // A child has no slabs, and would wait for ever for a lock that another thread of its parent held at fork().
  [[nodiscard]] bool in_forked_child() const { return getpid() != owner_; }

  const pid_t owner_ = getpid();
  const ArenaOptions options_;
  const MemoryLimits limits_;
  const std::size_t limit_;
  std::mutex growth_mutex_;   // one slab at a time; taken before mutex_, which is free while a slab is mapped
  mutable std::mutex mutex_;  // all below
  Slabs slabs_;
  std::size_t extents_ = 0;
  bool closed_ = false;
};

class PooledExtent : public Extent {
 public:
  PooledExtent() = default;
  ~PooledExtent() override {
    if (pool_) {
      pool_->release(slab_, data_);
    }
  }
  PooledExtent(const PooledExtent&) = delete;
  PooledExtent& operator=(const PooledExtent&) = delete;

  void hold(std::shared_ptr<SlabPool> pool, Slabs::iterator slab, std::size_t offset, std::size_t bytes) {
    pool_ = std::move(pool);
    slab_ = slab;
    data_ = slab->block().data() + offset;
    bytes_ = bytes;
  }

  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  std::shared_ptr<SlabPool> pool_;
  Slabs::iterator slab_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

std::shared_ptr<Extent> SlabPool::allocate(std::size_t bytes) {
  if (auto extent = take(bytes)) {
    return extent;
  }
  const std::lock_guard<std::mutex> growing(growth_mutex_);
  // Another thread may have mapped a slab with room to spare while this one waited.
  if (auto extent = take(bytes)) {
    return extent;
  }
  return grow(bytes);
}

std::shared_ptr<Extent> SlabPool::take(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return take_from(slabs_, bytes);
}

// The caller holds mutex_.
std::shared_ptr<Extent> SlabPool::take_from(Slabs& slabs, std::size_t bytes) {
  if (closed_) {
    throw SnapshotError("the arena is closed: nothing can be allocated from it");
  }
  // Made first: once a range is taken nothing may throw.
  auto extent = std::make_shared<PooledExtent>();
  if (bytes == 0) {
    return extent;
  }
  auto best = slabs.end();
  std::size_t best_fit = 0;
  for (auto slab = slabs.begin(); slab != slabs.end(); ++slab) {
    const auto fit = slab->ranges().best_fit(bytes);
    if (fit && (best == slabs.end() || *fit < best_fit)) {
      best = slab;
      best_fit = *fit;
    }
  }
  const auto offset = best == slabs.end() ? std::nullopt : best->ranges().allocate(bytes);
  if (!offset) {
    return nullptr;
  }
  ++extents_;
  extent->hold(shared_from_this(), best, *offset, round_to_granularity(bytes));
  return extent;
}

std::shared_ptr<Extent> SlabPool::grow(std::size_t bytes) {
  const std::size_t mapped = stats().mapped;
  const std::size_t growth_left = limit_ - std::min(limit_, mapped);
  const std::size_t needed = round_to_granularity(bytes);
  if (needed < bytes || needed > growth_left) {
    throw_full(bytes, "");
  }
  Slabs fresh;
  try {
    fresh = new_slab(needed, growth_left);
  } catch (const ArenaFullError& error) {
    throw_full(bytes, error.what());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  // From this slab even where another would fit better by now: an extra slab that is empty would never be given back.
  auto extent = take_from(fresh, bytes);
  slabs_.splice(slabs_.end(), fresh);
  return extent;
}

Slabs SlabPool::new_slab(std::size_t bytes, std::size_t growth_left) const {
  const std::size_t shared = std::max(bytes, std::min(kGrowthSlab, growth_left));
  Slabs slabs;
  if (shared > bytes) {
    try {
      slabs.emplace_back(shared, SlabKind::kGrowth, options_, limits_);
      return slabs;
    } catch (const ArenaFullError&) {
      // The host may still have room for what was asked.
      slabs.clear();
    }
  }
  slabs.emplace_back(bytes, SlabKind::kGrowth, options_, limits_);
  return slabs;
}

void SlabPool::throw_full(std::size_t asked, const std::string& host_reason) const {
  const ArenaStats now = stats();
  std::string message =
      "the arena has no room for " + exact(asked) + ": " + exact(now.free) + " are free, the largest free range is " +
      exact(now.largest_free) + ", " + format_bytes(now.used) + " are used by " + std::to_string(now.extents) +
      " extents, and of the limit of " + exact(now.limit) + " " + format_bytes(now.mapped) + " are mapped. ";
  if (!host_reason.empty()) {
    message += "The limit allows another slab but the host does not: " + host_reason;
  } else if (now.free >= asked) {
    message += "Enough is free, but fragmented. Drop the snapshots in between, or raise capacity or growth.";
  } else {
    message += "Drop a snapshot, or raise capacity or growth.";
  }
  throw ArenaFullError(message, asked, now.free, now.largest_free);
}

void SlabPool::release(Slabs::iterator slab, const std::byte* address) noexcept {
  if (in_forked_child()) {
    return;
  }
  Slabs given_back;  // destroyed, which takes long, when the lock is free again
  const std::lock_guard<std::mutex> lock(mutex_);
  slab->ranges().release(static_cast<std::size_t>(address - slab->block().data()));
  --extents_;
  if (slab->ranges().used() == 0 && (closed_ || slab->kind() == SlabKind::kGrowth)) {
    given_back.splice(given_back.end(), slabs_, slab);
  }
}

void SlabPool::close() noexcept {
  if (in_forked_child()) {
    return;
  }
  Slabs given_back;
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  for (auto slab = slabs_.begin(); slab != slabs_.end();) {
    const auto next = std::next(slab);
    if (slab->ranges().used() == 0) {
      given_back.splice(given_back.end(), slabs_, slab);
    }
    slab = next;
  }
}

ArenaStats SlabPool::stats() const {
  ArenaStats stats;
  stats.limit = limit_;
  stats.numa_node = options_.numa_node;
  const std::lock_guard<std::mutex> lock(mutex_);
  stats.slabs = slabs_.size();
  stats.extents = extents_;
  for (const Slab& slab : slabs_) {
    stats.mapped += slab.ranges().size();
    stats.used += slab.ranges().used();
    stats.largest_free = std::max(stats.largest_free, slab.ranges().largest_free());
    stats.pinned += slab.pin().pinned() ? slab.ranges().size() : 0;
    if (stats.pin_failure.empty()) {
      stats.pin_failure = slab.pin().failure();
    }
    if (!slab.block().bind_failure().empty()) {
      stats.numa_node = -1;
    }
  }
  stats.free = stats.mapped - stats.used;
  return stats;
}

class PooledArena : public Arena {
 public:
  explicit PooledArena(ArenaOptions options) : pool_(std::make_shared<SlabPool>(std::move(options))) {}
  ~PooledArena() override { pool_->close(); }
  PooledArena(const PooledArena&) = delete;
  PooledArena& operator=(const PooledArena&) = delete;

  [[nodiscard]] std::shared_ptr<Extent> allocate(std::size_t bytes) override { return pool_->allocate(bytes); }
  [[nodiscard]] ArenaStats stats() const override { return pool_->stats(); }
  void close() noexcept override { pool_->close(); }

 private:
  std::shared_ptr<SlabPool> pool_;
};

}  // namespace

std::shared_ptr<Arena> make_arena(const ArenaOptions& options) {
  ArenaOptions rounded = options;
  rounded.capacity = round_to_granularity(options.capacity);
  rounded.growth = round_to_granularity(options.growth);
  rounded.numa_node = std::max(options.numa_node, -1);
  if (rounded.pin == PinMode::kRequire && !rounded.pinner) {
    throw PinningError("pinned memory was required, but there is no device to pin it for");
  }
  return std::make_shared<PooledArena>(std::move(rounded));
}

}  // namespace shardsnap
