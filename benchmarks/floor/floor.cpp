// The yardstick: a team of threads that does nothing but copy with non-temporal stores, and memory to copy between.
// Independent of csrc on purpose, so that what is measured is not measured against itself.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLine = 64;

struct Piece {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
};

// Copies whole lines to an aligned destination.
using CopyLines = void (*)(std::byte* to, const std::byte* from, std::size_t lines);

struct Stores {
  CopyLines copy;
  const char* isa;
};

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void lines_avx512(std::byte* to, const std::byte* from, std::size_t lines) {
  for (; lines != 0; --lines, to += kLine, from += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
}

__attribute__((target("avx2"))) void lines_avx2(std::byte* to, const std::byte* from, std::size_t lines) {
  for (std::size_t half = 0; half != 2 * lines; ++half, to += kLine / 2, from += kLine / 2) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
}

void lines_sse2(std::byte* to, const std::byte* from, std::size_t lines) {
  for (std::size_t quarter = 0; quarter != 4 * lines; ++quarter, to += kLine / 4, from += kLine / 4) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
}

Stores choose_stores() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") != 0) {
    return {lines_avx512, "avx512"};
  }
  return __builtin_cpu_supports("avx2") != 0 ? Stores{lines_avx2, "avx2"} : Stores{lines_sse2, "sse2"};
}

void fence() { _mm_sfence(); }

#else

void lines_memcpy(std::byte* to, const std::byte* from, std::size_t lines) { std::memcpy(to, from, lines * kLine); }
Stores choose_stores() { return {lines_memcpy, "memcpy"}; }
void fence() {}

#endif

const Stores& stores() {
  static const Stores kStores = choose_stores();
  return kStores;
}

void copy_streaming(const Piece& piece) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(piece.to) % kLine;
  const std::size_t head = misaligned == 0 ? 0 : kLine - misaligned;
  if (piece.bytes < head + kLine) {
    std::memcpy(piece.to, piece.from, piece.bytes);
    return;
  }
  std::memcpy(piece.to, piece.from, head);
  const std::size_t lines = (piece.bytes - head) / kLine;
  stores().copy(piece.to + head, piece.from + head, lines);
  const std::size_t done = head + lines * kLine;
  std::memcpy(piece.to + done, piece.from + done, piece.bytes - done);
}

void copy_piece(const Piece& piece, bool streaming) {
  if (streaming) {
    copy_streaming(piece);
  } else {
    std::memcpy(piece.to, piece.from, piece.bytes);
  }
}

// Threads that exist before the clock starts: all of them do each job, and run() returns when the last is done.
class Team {
 public:
  using Job = std::function<void(unsigned member)>;

  explicit Team(unsigned members) {
    for (unsigned member = 0; member != members; ++member) {
      threads_.emplace_back([this, member] { work(member); });
    }
  }

  ~Team() {
    run(nullptr);
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  [[nodiscard]] unsigned members() const { return static_cast<unsigned>(threads_.size()); }

  // An empty job ends the threads.
  void run(Job job) {
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = std::move(job);
    left_ = members();
    ++round_;
    started_.notify_all();
    ended_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  void work(unsigned member) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (unsigned long seen = 0;;) {
      started_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      const bool last_round = !job_;
      if (!last_round) {
        lock.unlock();
        job_(member);
        lock.lock();
      }
      if (--left_ == 0) {
        ended_.notify_all();
      }
      if (last_round) {
        return;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable ended_;
  Job job_;
  unsigned left_ = 0;
  unsigned long round_ = 0;
  std::vector<std::thread> threads_;
};

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

void touch(std::byte* memory, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t offset = 0; offset < bytes; offset += page) {
    *const_cast<volatile std::byte*>(memory + offset) = std::byte{1};
  }
}

}  // namespace

extern "C" {

const char* floor_isa() { return stores().isa; }

Team* floor_open(unsigned threads) { return new Team(threads); }
void floor_close(Team* team) { delete team; }

// The threads take one piece after the other, whichever is free.
void floor_copy(Team* team, const Piece* pieces, std::size_t count, bool streaming) {
  std::atomic<std::size_t> next{0};
  team->run([&](unsigned) {
    for (std::size_t index = next++; index < count; index = next++) {
      copy_piece(pieces[index], streaming);
    }
    fence();
  });
}

// Every thread copies its own share of the bytes `repeats` times.
void floor_repeat(Team* team, std::byte* to, const std::byte* from, std::size_t bytes, std::size_t repeats,
                  bool streaming) {
  const std::size_t share = bytes / team->members();
  team->run([&](unsigned member) {
    const Piece piece{to + member * share, from + member * share, share};
    for (std::size_t repeat = 0; repeat != repeats; ++repeat) {
      copy_piece(piece, streaming);
      fence();
    }
  });
}

// Memory with every page present, aligned to a huge page; null where there is none. Give it back to floor_unmap().
std::byte* floor_map(std::size_t bytes, bool huge_pages) {
  const std::size_t size = round_up(bytes, kHugePage);
  void* mapping = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    return nullptr;
  }
  auto* const begin = static_cast<std::byte*>(mapping);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t before = round_up(address, kHugePage) - address;
  if (before != 0) {
    munmap(begin, before);
  }
  if (before != kHugePage) {
    munmap(begin + before + size, kHugePage - before);
  }
  std::byte* const memory = begin + before;
  madvise(memory, size, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  touch(memory, bytes);
  return memory;
}

void floor_unmap(std::byte* memory, std::size_t bytes) { munmap(memory, round_up(bytes, kHugePage)); }

}  // extern "C"
