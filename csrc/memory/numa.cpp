#include "memory/numa.hpp"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <climits>
#include <fstream>
#include <sstream>
#include <system_error>
#include <vector>

namespace shardsnap {
namespace {

constexpr int kMostNodes = 4096;  // no kernel is built with more; keeps a damaged list from filling memory

// "0-1,4" as the kernel writes lists; what cannot be read is left out.
std::set<int> parse_node_list(const std::string& text) {
  std::set<int> nodes;
  std::istringstream pieces(text);
  for (std::string piece; std::getline(pieces, piece, ',');) {
    const char* end = piece.data() + piece.size();
    int first = 0;
    const auto first_read = std::from_chars(piece.data(), end, first);
    if (first_read.ec != std::errc()) {
      continue;
    }
    int last = first;
    if (first_read.ptr != end && *first_read.ptr == '-' &&
        std::from_chars(first_read.ptr + 1, end, last).ec != std::errc()) {
      continue;
    }
    for (int node = first; node >= 0 && node <= last && node < kMostNodes; ++node) {
      nodes.insert(node);
    }
  }
  return nodes;
}

std::set<int> nodes_in_file(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return parse_node_list(line);
}

std::string why_mbind_failed(int error) {
  if (error == EPERM) {
    return "mbind is not permitted (a container's seccomp profile asks for CAP_SYS_NICE)";
  }
  if (error == ENOSYS) {
    return "this kernel has no mbind";
  }
  return "mbind failed: " + std::generic_category().message(error);
}

}  // namespace

NumaTopology::NumaTopology(const std::string& sysfs_root) {
  // A node may hold CPUs only, and then nothing can be placed on it.
  for (const char* list : {"has_memory", "online"}) {
    nodes_ = nodes_in_file(sysfs_root + "/devices/system/node/" + list);
    if (!nodes_.empty()) {
      return;
    }
  }
  nodes_ = {0};
}

std::string bind_to_node(void* address, std::size_t bytes, int node, const NumaTopology& topology) {
  if (!topology.has_node(node)) {
    return "this machine has no memory on NUMA node " + std::to_string(node);
  }
  constexpr std::size_t bits = sizeof(unsigned long) * CHAR_BIT;
  const auto index = static_cast<std::size_t>(node);
  std::vector<unsigned long> mask(index / bits + 1);
  mask[index / bits] = 1UL << (index % bits);
  // PREFERRED, not BIND: where the node is full the pages come from another one, instead of the OOM killer.
  // The kernel reads one bit fewer than it is told.
  const long result = syscall(SYS_mbind, address, bytes, MPOL_PREFERRED, mask.data(), mask.size() * bits + 1, 0U);
  return result == 0 ? std::string() : why_mbind_failed(errno);
}

}  // namespace shardsnap
