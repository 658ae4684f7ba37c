// Host memory copies that choose their stores: cached for small working sets, non-temporal for large ones.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace shardsnap {

// From this many bytes in one batch a copy no longer fits the caches beside its source, and non-temporal stores win:
// on a Xeon of 2023 (2 MiB of L2 a core) they passed memcpy between 1 and 4 MiB (`make bench` prints the crossing).
constexpr std::size_t kStreamingBatchBytes = std::size_t{4} << 20;

// Below this size of a single range the fence and the unaligned ends of a non-temporal copy cost more than they save.
constexpr std::size_t kStreamingRangeBytes = std::size_t{8} << 10;

// The widest instruction set that copy_streaming() uses here: "avx512", "avx2", "sse2" or "memcpy".
const char* streaming_copy_isa();

// memcpy that leaves the destination out of the caches. The ranges do not overlap. Not ordered against later stores
// until streaming_fence().
void copy_streaming(std::byte* destination, const std::byte* source, std::size_t bytes);

// For tests: what copy_streaming() could use here, widest first, and the same copy with one of them. Throws
// std::invalid_argument where `isa` is none of them.
std::vector<std::string> streaming_copy_isas();
void copy_streaming(std::byte* destination, const std::byte* source, std::size_t bytes, const std::string& isa);

// Makes every copy_streaming() of this thread visible before its later stores.
void streaming_fence();

}  // namespace shardsnap
