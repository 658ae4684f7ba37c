// How much host memory may be taken now, and the words that say it is too little.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <string>

namespace shardsnap {

// Where the kernel's files lie; tests put their own there.
struct MemoryRoots {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// One cgroup that limits this process. Sizes in bytes.
struct CgroupRoom {
  std::string limit_file;
  std::size_t limit = 0;
  std::size_t usage = 0;
  std::size_t reclaimable = 0;  // page cache in usage that the kernel drops before it kills

  [[nodiscard]] std::size_t available() const;
};

struct HostRoom {
  std::size_t available = std::numeric_limits<std::size_t>::max();  // the least of the two below
  std::optional<std::size_t> mem_available;
  std::optional<CgroupRoom> cgroup;  // the tightest of those that limit this process

  // What is left to the rest of the process.
  [[nodiscard]] std::size_t headroom() const;
  [[nodiscard]] std::string describe() const;
};

class MemoryLimits {
 public:
  explicit MemoryLimits(MemoryRoots roots = {});

  [[nodiscard]] HostRoom room() const;

  // Throws ArenaFullError where `bytes` and the headroom do not fit. Call before memory is touched.
  void check_room(std::size_t bytes) const;

  // The same while memory is being touched, for the `bytes` still to come.
  void recheck_room(std::size_t bytes) const;

 private:
  MemoryRoots roots_;
};

// "1.50 GiB".
[[nodiscard]] std::string format_bytes(std::size_t bytes);

// RLIMIT_MEMLOCK, for the message when pinning was refused. It is no reason to refuse: the CUDA driver pins through its
// own kernel module, which counts against this limit on some systems only.
[[nodiscard]] std::string describe_memlock_limit();

}  // namespace shardsnap
