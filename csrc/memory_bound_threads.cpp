#include "memory_bound_threads.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace shardsnap {
namespace {

constexpr unsigned kMostThreads = 16;

unsigned usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // Fails where the machine has more cores than a cpu_set_t holds.
  const int count = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 0;
  return count > 0 ? static_cast<unsigned>(count) : std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace

unsigned memory_bound_threads() { return std::min(usable_cores(), kMostThreads); }

}  // namespace shardsnap
