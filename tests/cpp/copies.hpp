// Small helpers for tests that copy bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "device/copy_device.hpp"

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<std::uint64_t> words(count / sizeof(std::uint64_t) + 1);
  std::generate(words.begin(), words.end(), std::ref(engine));
  const auto* const first = reinterpret_cast<const std::byte*>(words.data());
  return {first, first + count};
}

inline std::uintptr_t address_of(const std::byte* memory) { return reinterpret_cast<std::uintptr_t>(memory); }
inline std::uintptr_t address_of(const Bytes& bytes) { return address_of(bytes.data()); }

inline shardsnap::CopyRanges ranges_of(std::vector<shardsnap::CopyRange> ranges) {
  return std::make_shared<const std::vector<shardsnap::CopyRange>>(std::move(ranges));
}

inline shardsnap::CopyRanges whole(const std::byte* device, std::size_t bytes) {
  return ranges_of({{address_of(device), 0, bytes}});
}
inline shardsnap::CopyRanges whole(const Bytes& device) { return whole(device.data(), device.size()); }
