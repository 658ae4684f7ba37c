// What the emulated driver counted, for tests that prove that nothing leaks and which path the copies took.
#pragma once

#include <cstdint>

namespace shardsnap::emulator {

// Only 64-bit fields, so that ctypes can read it without a thought about padding.
struct Counts {
  std::uint64_t context_references;  // live: primary context references, all devices
  std::uint64_t streams;             // live
  std::uint64_t events;              // live
  std::uint64_t registrations;       // live: host ranges
  std::uint64_t orphans;             // ever: streams, events and registrations that their context took down with it
  std::uint64_t batch_calls;         // ever: accepted calls of cuMemcpyBatchAsync
  std::uint64_t batch_copies;        // ever: copies within those
  std::uint64_t single_copies;       // ever: accepted calls of cuMemcpyHtoDAsync and cuMemcpyDtoHAsync
};

// The exported C function's name and type, for dlsym.
inline constexpr const char* kCountsSymbol = "shardsnap_emulator_counts";
using CountsFunction = void (*)(Counts* counts);

}  // namespace shardsnap::emulator
