#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "copies.hpp"
#include "device/streaming_copy.hpp"
#include "sanitizers.hpp"

namespace {

using shardsnap::copy_streaming;
using shardsnap::streaming_copy_isa;
using shardsnap::streaming_copy_isas;
using shardsnap::streaming_fence;

constexpr std::size_t kAlignment = 64;  // of the stores
constexpr std::size_t kBlock = 256;     // of the loops
constexpr auto kUntouched = std::byte{0xA5};

// A copy into the middle of a field of known bytes, and what came of it.
class Field {
 public:
  explicit Field(std::size_t largest)
      : source_(random_bytes(largest + 2 * kAlignment, 1)), memory_(largest + 4 * kAlignment, kUntouched) {}

  // One copy with these distances from a 64-byte boundary. True if it is exact and nothing else has changed.
  bool copies(const std::string& isa, std::size_t to_offset, std::size_t from_offset, std::size_t bytes) {
    std::byte* const to = aligned(memory_.data() + kAlignment) + to_offset;
    const std::byte* const from = aligned(source_.data()) + from_offset;
    copy_streaming(to, from, bytes, isa);
    streaming_fence();
    const bool before = std::all_of(memory_.data(), to, untouched);
    const bool exact = std::equal(from, from + bytes, to);
    const bool after = std::all_of(to + bytes, memory_.data() + memory_.size(), untouched);
    std::fill_n(to, bytes, kUntouched);
    return before && exact && after;
  }

 private:
  template <typename Pointer>
  static Pointer aligned(Pointer pointer) {
    return pointer + (kAlignment - address_of(pointer) % kAlignment) % kAlignment;
  }
  static bool untouched(std::byte byte) { return byte == kUntouched; }

  Bytes source_;
  Bytes memory_;
};

// Around every place where a copy takes another way: nothing, the aligned head, the first and the next blocks.
std::set<std::size_t> border_sizes(std::size_t to_offset) {
  const std::size_t head = (kAlignment - to_offset) % kAlignment;
  std::set<std::size_t> sizes;
  for (const std::size_t border : {std::size_t{0}, head, kBlock, head + kBlock, head + 2 * kBlock, head + 3 * kBlock}) {
    for (std::size_t size = border < 2 ? 0 : border - 2; size <= border + 2; ++size) {
      sizes.insert(size);
    }
  }
  return sizes;
}

// Far too slow with a sanitizer for all of them.
constexpr std::size_t kSourceStep = kAddressSanitizer || kThreadSanitizer ? 21 : 1;

}  // namespace

TEST_SUITE("streaming copy") {
  TEST_CASE("every alignment, at every border of the blocks") {
    for (const std::string& isa : streaming_copy_isas()) {
      CAPTURE(isa);
      Field field(4 * kBlock + 4 * kAlignment);
      std::size_t wrong = 0;
      for (std::size_t to = 0; to < kAlignment; ++to) {
        for (const std::size_t bytes : border_sizes(to)) {
          for (std::size_t from = 0; from < kAlignment; from += kSourceStep) {
            wrong += field.copies(isa, to, from, bytes) ? 0 : 1;
          }
        }
      }
      CHECK(wrong == 0);
    }
  }

  TEST_CASE("every size up to four blocks") {
    for (const std::string& isa : streaming_copy_isas()) {
      CAPTURE(isa);
      Field field(4 * kBlock + 4 * kAlignment);
      std::size_t wrong = 0;
      for (std::size_t bytes = 0; bytes <= 4 * kBlock; ++bytes) {
        wrong += field.copies(isa, bytes % kAlignment, bytes * 7 % kAlignment, bytes) ? 0 : 1;
      }
      CHECK(wrong == 0);
    }
  }

  TEST_CASE("large copies") {
    std::mt19937_64 engine(2);
    for (const std::string& isa : streaming_copy_isas()) {
      CAPTURE(isa);
      Field field(std::size_t{1} << 20);
      for (int round = 0; round < 20; ++round) {
        CHECK(field.copies(isa, engine() % kAlignment, engine() % kAlignment, engine() >> 44U));
      }
    }
  }

  TEST_CASE("the plain call takes the widest instruction set") {
    CHECK(streaming_copy_isas().front() == streaming_copy_isa());
    const Bytes from = random_bytes(10001, 3);
    Bytes to(from.size());
    copy_streaming(to.data(), from.data(), from.size());
    streaming_fence();
    CHECK(to == from);
  }

#if defined(__x86_64__)
  TEST_CASE("what the processor can do is used, and only that") {
    __builtin_cpu_init();
    std::vector<std::string> expected;
    if (__builtin_cpu_supports("avx512f") != 0) {
      expected.emplace_back("avx512");
    }
    if (__builtin_cpu_supports("avx2") != 0) {
      expected.emplace_back("avx2");
    }
    expected.emplace_back("sse2");
    CHECK(streaming_copy_isas() == expected);
  }
#endif

  TEST_CASE("an instruction set that is not there is refused") {
    Bytes memory(1);
    CHECK_THROWS_AS(copy_streaming(memory.data(), memory.data(), 0, "avx1024"), std::invalid_argument);
  }
}
