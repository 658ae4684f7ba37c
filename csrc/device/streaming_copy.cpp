#include "device/streaming_copy.hpp"

#include <cstdint>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shardsnap {

#if defined(__x86_64__)

namespace {

constexpr std::size_t kBlock = 256;  // four AVX-512 vectors; every kernel below moves whole blocks
constexpr std::size_t kStoreAlignment = 64;

using BlockCopy = void (*)(std::byte*, const std::byte*, std::size_t);

struct Kernel {
  BlockCopy copy;
  const char* isa;
};

__attribute__((target("avx512f"))) void copy_blocks_avx512(std::byte* destination, const std::byte* source,
                                                           std::size_t blocks) {
  for (; blocks != 0; --blocks, source += kBlock, destination += kBlock) {
    const __m512i a = _mm512_loadu_si512(source);
    const __m512i b = _mm512_loadu_si512(source + 64);
    const __m512i c = _mm512_loadu_si512(source + 128);
    const __m512i d = _mm512_loadu_si512(source + 192);
    auto* const out = reinterpret_cast<__m512i*>(destination);
    _mm512_stream_si512(out, a);
    _mm512_stream_si512(out + 1, b);
    _mm512_stream_si512(out + 2, c);
    _mm512_stream_si512(out + 3, d);
  }
}

__attribute__((target("avx2"))) void copy_blocks_avx2(std::byte* destination, const std::byte* source,
                                                      std::size_t blocks) {
  for (std::size_t half = 0; half != 2 * blocks; ++half, source += kBlock / 2, destination += kBlock / 2) {
    const auto* const in = reinterpret_cast<const __m256i*>(source);
    const __m256i a = _mm256_loadu_si256(in);
    const __m256i b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2);
    const __m256i d = _mm256_loadu_si256(in + 3);
    auto* const out = reinterpret_cast<__m256i*>(destination);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
    _mm256_stream_si256(out + 2, c);
    _mm256_stream_si256(out + 3, d);
  }
}

void copy_blocks_sse2(std::byte* destination, const std::byte* source, std::size_t blocks) {
  for (std::size_t quarter = 0; quarter != 4 * blocks; ++quarter, source += kBlock / 4, destination += kBlock / 4) {
    const auto* const in = reinterpret_cast<const __m128i*>(source);
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    auto* const out = reinterpret_cast<__m128i*>(destination);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
}

// Those that this machine can run, widest first.
std::vector<Kernel> usable_kernels() {
  __builtin_cpu_init();
  std::vector<Kernel> kernels;
  if (__builtin_cpu_supports("avx512f") != 0) {
    kernels.push_back({copy_blocks_avx512, "avx512"});
  }
  if (__builtin_cpu_supports("avx2") != 0) {
    kernels.push_back({copy_blocks_avx2, "avx2"});
  }
  kernels.push_back({copy_blocks_sse2, "sse2"});
  return kernels;
}

const Kernel& kernel() {
  static const Kernel chosen = usable_kernels().front();
  return chosen;
}

void copy_with(const Kernel& kernel, std::byte* destination, const std::byte* source, std::size_t bytes) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(destination) % kStoreAlignment;
  const std::size_t head = misaligned == 0 ? 0 : kStoreAlignment - misaligned;
  if (bytes < head + kBlock) {
    std::memcpy(destination, source, bytes);
    return;
  }
  std::memcpy(destination, source, head);
  const std::size_t blocks = (bytes - head) / kBlock;
  kernel.copy(destination + head, source + head, blocks);
  const std::size_t copied = head + blocks * kBlock;
  std::memcpy(destination + copied, source + copied, bytes - copied);
}

}  // namespace

const char* streaming_copy_isa() { return kernel().isa; }

void copy_streaming(std::byte* destination, const std::byte* source, std::size_t bytes) {
  copy_with(kernel(), destination, source, bytes);
}

std::vector<std::string> streaming_copy_isas() {
  std::vector<std::string> isas;
  for (const Kernel& usable : usable_kernels()) {
    isas.emplace_back(usable.isa);
  }
  return isas;
}

void copy_streaming(std::byte* destination, const std::byte* source, std::size_t bytes, const std::string& isa) {
  for (const Kernel& usable : usable_kernels()) {
    if (isa == usable.isa) {
      copy_with(usable, destination, source, bytes);
      return;
    }
  }
  throw std::invalid_argument("this machine has no streaming copy with " + isa);
}

void streaming_fence() { _mm_sfence(); }

#else

const char* streaming_copy_isa() { return "memcpy"; }

void copy_streaming(std::byte* destination, const std::byte* source, std::size_t bytes) {
  std::memcpy(destination, source, bytes);
}

std::vector<std::string> streaming_copy_isas() { return {"memcpy"}; }

void copy_streaming(std::byte* destination, const std::byte* source, std::size_t bytes, const std::string& isa) {
  if (isa != streaming_copy_isa()) {
    throw std::invalid_argument("this machine has no streaming copy with " + isa);
  }
  std::memcpy(destination, source, bytes);
}

void streaming_fence() {}

#endif

}  // namespace shardsnap
