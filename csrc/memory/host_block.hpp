// One block of private memory from the system, and how its pages come to be there before they are needed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <string>

namespace shardsnap {

// Called with the bytes still to be touched; throws where they no longer fit.
using RoomCheck = std::function<void(std::size_t remaining)>;

// Children of fork() do not have the block, and destroying it there does nothing.
class HostBlock {
 public:
  // Maps, and touches nothing. `numa_node` < 0 leaves placement to the kernel. Throws ArenaFullError.
  HostBlock(std::size_t bytes, int numa_node, bool huge_pages);
  ~HostBlock();
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  // Backs every page, by `threads` threads (0: one per usable core, at most 16). `check` is called before each GiB;
  // when it throws, the block is to be destroyed. Throws ArenaFullError.
  void prefault(unsigned threads, const RoomCheck& check);

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  // Why the pages are not asked from numa_node; empty where they are, or where none was given.
  [[nodiscard]] const std::string& bind_failure() const { return bind_failure_; }
  [[nodiscard]] bool in_owner_process() const;

 private:
  HostBlock(std::size_t bytes, std::size_t alignment);

  std::byte* data_;
  std::size_t bytes_;
  pid_t owner_;
  std::string bind_failure_;
};

// Writes to each page of memory that holds zeros, for kernels before 5.14.
void touch_pages(std::byte* address, std::size_t bytes);

}  // namespace shardsnap
