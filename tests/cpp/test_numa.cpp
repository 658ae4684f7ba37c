#include <doctest/doctest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <string>

#include "memory/host_block.hpp"
#include "memory/numa.hpp"
#include "temporary_directory.hpp"

using shardsnap::bind_to_node;
using shardsnap::HostBlock;
using shardsnap::NumaTopology;

TEST_CASE("nodes are those that have memory") {
  const TemporaryDirectory sysfs;
  sysfs.write("devices/system/node/online", "0-3\n");
  sysfs.write("devices/system/node/has_memory", "0,2-3\n");
  const NumaTopology topology(sysfs.path());
  CHECK(topology.node_count() == 3);
  CHECK(topology.has_node(0));
  CHECK_FALSE(topology.has_node(1));
  CHECK(topology.has_node(3));
  CHECK_FALSE(topology.has_node(4));
  CHECK_FALSE(topology.has_node(-1));
}

TEST_CASE("nodes that are online count where the kernel does not say which have memory") {
  const TemporaryDirectory sysfs;
  sysfs.write("devices/system/node/online", "0-1\n");
  CHECK(NumaTopology(sysfs.path()).node_count() == 2);
}

TEST_CASE("a kernel without NUMA has node 0") {
  const TemporaryDirectory sysfs;
  const NumaTopology topology(sysfs.path());
  CHECK(topology.node_count() == 1);
  CHECK(topology.has_node(0));
}

TEST_CASE("a damaged list is no reason to fail") {
  const TemporaryDirectory sysfs;
  sysfs.write("devices/system/node/has_memory", "x,1-y,-4,2,0-4294967295,0-2000000000");
  const NumaTopology topology(sysfs.path());
  CHECK(topology.has_node(2));
  CHECK(topology.node_count() <= 4096);
}

TEST_CASE("this machine has a node") { CHECK(NumaTopology().node_count() >= 1); }

TEST_CASE("binding to a node that is not there is reported, not thrown") {
  const HostBlock block(1 << 20, 3000, false);
  CHECK(block.bind_failure().find("NUMA node 3000") != std::string::npos);
}

TEST_CASE("a refusal by the kernel is reported") {
  alignas(8) std::array<std::byte, 64> memory{};
  const TemporaryDirectory sysfs;
  CHECK_FALSE(bind_to_node(memory.data() + 1, memory.size(), 0, NumaTopology(sysfs.path())).empty());
}

TEST_CASE("a bound block prefers its node") {
  const HostBlock block(1 << 20, 0, false);
  if (!block.bind_failure().empty()) {
    MESSAGE("not bound here: ", block.bind_failure());
    return;
  }
  int mode = -1;
  std::array<unsigned long, 64> nodes{};
  const long result = syscall(SYS_get_mempolicy, &mode, nodes.data(), nodes.size() * 64, block.data(), MPOL_F_ADDR);
  if (result != 0) {
    return;  // a container may forbid asking
  }
  CHECK(mode == MPOL_PREFERRED);
  CHECK(nodes[0] == 1);
}
