// Which ranges of [0, size) are taken. It knows no memory: a slab puts its address on top.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace shardsnap {

inline constexpr std::size_t kExtentGranularity = 4096;

// Up to a multiple of kExtentGranularity; down to the largest one where rounding up would overflow.
[[nodiscard]] std::size_t round_to_granularity(std::size_t bytes);

// Best fit, lowest offset among equals; neighbours that are free are always one range. Every operation is O(log n).
class ExtentAllocator {
 public:
  // `size` is rounded down to kExtentGranularity.
  explicit ExtentAllocator(std::size_t size);

  // The size of the free range that `bytes` would be cut from; nothing where none is large enough.
  [[nodiscard]] std::optional<std::size_t> best_fit(std::size_t bytes) const;

  // The offset of a range of `bytes` rounded up to kExtentGranularity; nothing where it does not fit or bytes is 0.
  [[nodiscard]] std::optional<std::size_t> allocate(std::size_t bytes);

  // Never allocates, so that a destructor may call it. False, and no change, where no range was taken at `offset`.
  bool release(std::size_t offset) noexcept;

  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::size_t used() const { return used_; }
  [[nodiscard]] std::size_t largest_free() const;

 private:
  using FreeBySize = std::set<std::pair<std::size_t, std::size_t>>;  // (bytes, offset)

  struct Range {
    std::size_t bytes = 0;
    FreeBySize::node_type parked;  // a taken range keeps its node of the free index: release() puts it back
  };
  using Ranges = std::map<std::size_t, Range>;  // by offset; together they tile [0, size)

  void absorb_next(Ranges::iterator range) noexcept;

  std::size_t size_;
  std::size_t used_ = 0;
  Ranges ranges_;
  FreeBySize free_by_size_;
};

}  // namespace shardsnap
