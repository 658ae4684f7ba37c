// NUMA nodes, without libnuma: what sysfs lists, and a placement by system call.
#pragma once

#include <cstddef>
#include <set>
#include <string>

namespace shardsnap {

class NumaTopology {
 public:
  explicit NumaTopology(const std::string& sysfs_root = "/sys");

  // At least 1: a kernel without NUMA has one node, 0.
  [[nodiscard]] std::size_t node_count() const { return nodes_.size(); }
  // A node with memory.
  [[nodiscard]] bool has_node(int node) const { return nodes_.count(node) > 0; }

 private:
  std::set<int> nodes_;
};

// Asks for the pages of [address, address + bytes), none touched yet, to come from `node`. Returns why that failed,
// empty where it did not: wrongly placed memory is slower, not wrong, so this never throws for it.
[[nodiscard]] std::string bind_to_node(void* address, std::size_t bytes, int node, const NumaTopology& topology);

}  // namespace shardsnap
