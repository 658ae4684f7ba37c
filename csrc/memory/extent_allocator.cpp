#include "memory/extent_allocator.hpp"

#include <iterator>
#include <limits>

namespace shardsnap {

std::size_t round_to_granularity(std::size_t bytes) {
  constexpr std::size_t mask = kExtentGranularity - 1;
  constexpr std::size_t largest = std::numeric_limits<std::size_t>::max() & ~mask;
  return bytes > largest ? largest : (bytes + mask) & ~mask;
}

ExtentAllocator::ExtentAllocator(std::size_t size) : size_(size - size % kExtentGranularity) {
  if (size_ > 0) {
    ranges_[0].bytes = size_;
    free_by_size_.emplace(size_, 0);
  }
}

std::optional<std::size_t> ExtentAllocator::best_fit(std::size_t bytes) const {
  const auto fit = free_by_size_.lower_bound({bytes, 0});
  if (bytes == 0 || fit == free_by_size_.end()) {
    return std::nullopt;
  }
  return fit->first;
}

std::optional<std::size_t> ExtentAllocator::allocate(std::size_t bytes) {
  const std::size_t wanted = round_to_granularity(bytes);
  const auto fit = free_by_size_.lower_bound({wanted, 0});
  // Rounding saturates, so a request close to SIZE_MAX may come out smaller than it was.
  if (bytes == 0 || wanted < bytes || fit == free_by_size_.end()) {
    return std::nullopt;
  }
  const auto [found, offset] = *fit;
  const auto range = ranges_.find(offset);
  if (found > wanted) {
    const auto rest = ranges_.try_emplace(std::next(range), offset + wanted);
    rest->second.bytes = found - wanted;
    try {
      free_by_size_.emplace(found - wanted, offset + wanted);
    } catch (...) {
      ranges_.erase(rest);
      throw;
    }
  }
  range->second.bytes = wanted;
  range->second.parked = free_by_size_.extract(fit);
  used_ += wanted;
  return offset;
}

bool ExtentAllocator::release(std::size_t offset) noexcept {
  auto range = ranges_.find(offset);
  if (range == ranges_.end() || range->second.parked.empty()) {
    return false;
  }
  used_ -= range->second.bytes;
  auto node = std::move(range->second.parked);
  absorb_next(range);
  if (range != ranges_.begin()) {
    const auto previous = std::prev(range);
    if (previous->second.parked.empty()) {
      free_by_size_.erase({previous->second.bytes, previous->first});
      absorb_next(previous);
      range = previous;
    }
  }
  node.value() = {range->second.bytes, range->first};
  free_by_size_.insert(std::move(node));
  return true;
}

void ExtentAllocator::absorb_next(Ranges::iterator range) noexcept {
  const auto next = std::next(range);
  if (next == ranges_.end() || !next->second.parked.empty()) {
    return;
  }
  free_by_size_.erase({next->second.bytes, next->first});
  range->second.bytes += next->second.bytes;
  ranges_.erase(next);
}

std::size_t ExtentAllocator::largest_free() const { return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first; }

}  // namespace shardsnap
