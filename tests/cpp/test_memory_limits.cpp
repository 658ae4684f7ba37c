#include <doctest/doctest.h>

#include <cstddef>
#include <limits>
#include <string>

#include "errors.hpp"
#include "memory/memory_limits.hpp"
#include "temporary_directory.hpp"

namespace {

using shardsnap::ArenaFullError;
using shardsnap::format_bytes;
using shardsnap::HostRoom;
using shardsnap::MemoryLimits;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kGiB = std::size_t{1} << 30;
constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

std::string text(std::size_t value) { return std::to_string(value) + "\n"; }

// A machine made of files.
class Machine {
 public:
  explicit Machine(std::size_t mem_available) {
    files_.write("proc/meminfo", "MemTotal:       99999999 kB\nMemFree:            1 kB\nMemAvailable:   " +
                                     std::to_string(mem_available / 1024) + " kB\nBuffers:  7 kB\n");
  }

  void process_in(const std::string& lines) const { files_.write("proc/self/cgroup", lines); }

  void v2(const std::string& directory, const std::string& limit, std::size_t usage, std::size_t reclaimable) const {
    files_.write("cgroup" + directory + "/memory.max", limit + "\n");
    files_.write("cgroup" + directory + "/memory.current", text(usage));
    files_.write("cgroup" + directory + "/memory.stat",
                 "anon 5\ninactive_file " + text(reclaimable) + "active_file 12345678901234\n");
  }

  void v1(const std::string& directory, const std::string& limit, std::size_t usage, std::size_t reclaimable) const {
    const std::string base = "cgroup/memory" + directory;
    files_.write(base + "/memory.limit_in_bytes", limit + "\n");
    files_.write(base + "/memory.usage_in_bytes", text(usage));
    files_.write(base + "/memory.stat",
                 "inactive_file 1\nrss 5\ntotal_inactive_file " + text(reclaimable) + "total_rss 5\n");
  }

  [[nodiscard]] MemoryLimits limits() const {
    return MemoryLimits({files_.path() + "/proc", files_.path() + "/cgroup"});
  }
  [[nodiscard]] HostRoom room() const { return limits().room(); }
  [[nodiscard]] const TemporaryDirectory& files() const { return files_; }

 private:
  TemporaryDirectory files_;
};

std::string refusal(const MemoryLimits& limits, std::size_t bytes) {
  try {
    limits.check_room(bytes);
  } catch (const ArenaFullError& error) {
    CHECK(error.asked() == bytes);
    return error.what();
  }
  return "";
}

bool has(const std::string& message, const std::string& part) { return message.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("without a cgroup MemAvailable counts") {
  const Machine machine(10 * kGiB);
  CHECK(machine.room().available == 10 * kGiB);
  CHECK_FALSE(machine.room().cgroup.has_value());
}

TEST_CASE("nothing known is no limit") {
  const TemporaryDirectory empty;
  const MemoryLimits limits({empty.path(), empty.path()});
  CHECK(limits.room().available == kUnlimited);
  CHECK_FALSE(limits.room().mem_available.has_value());
  CHECK_NOTHROW(limits.check_room(kGiB));
}

TEST_CASE("v2: the page cache of a cgroup counts as free") {
  const Machine machine(100 * kGiB);
  machine.process_in("0::/job\n");
  machine.v2("/job", std::to_string(8 * kGiB), 5 * kGiB, 2 * kGiB);
  CHECK(machine.room().available == 5 * kGiB);
}

TEST_CASE("v2: the tightest of all ancestors counts") {
  const Machine machine(100 * kGiB);
  machine.process_in("0::/slice/job/step\n");
  machine.v2("/slice/job/step", "max", kGiB, 0);
  SUBCASE("the middle one") {
    machine.v2("/slice/job", std::to_string(6 * kGiB), 2 * kGiB, 0);
    machine.v2("/slice", std::to_string(90 * kGiB), 10 * kGiB, 0);
    CHECK(machine.room().available == 4 * kGiB);
    CHECK(has(machine.room().cgroup->limit_file, "/slice/job/memory.max"));
  }
  SUBCASE("the outer one, larger but fuller") {
    machine.v2("/slice/job", std::to_string(6 * kGiB), 2 * kGiB, 0);
    machine.v2("/slice", std::to_string(90 * kGiB), 89 * kGiB, 0);
    CHECK(machine.room().available == kGiB);
  }
  SUBCASE("the mount's root, as in a container") {
    machine.v2("", std::to_string(3 * kGiB), 0, 0);
    CHECK(machine.room().available == 3 * kGiB);
  }
  SUBCASE("max everywhere") {
    machine.v2("/slice/job", "max", kGiB, 0);
    CHECK(machine.room().available == 100 * kGiB);
    CHECK_FALSE(machine.room().cgroup.has_value());
  }
}

TEST_CASE("v2: the host's path, which does not exist under the container's mount") {
  const Machine machine(100 * kGiB);
  machine.v2("", std::to_string(4 * kGiB), kGiB, 0);
  SUBCASE("missing") { machine.process_in("0::/kubepods.slice/pod12.slice/cri-1234.scope\n"); }
  SUBCASE("outside the namespace") { machine.process_in("0::/../../other\n"); }
  SUBCASE("the root") { machine.process_in("0::/\n"); }
  SUBCASE("no list of cgroups at all") {}
  CHECK(machine.room().available == 3 * kGiB);
}

TEST_CASE("v2 beside v1, under unified") {
  const Machine machine(100 * kGiB);
  machine.process_in("1:name=systemd:/\n0::/job\n");
  machine.v2("/unified/job", std::to_string(4 * kGiB), kGiB, 0);
  CHECK(machine.room().available == 3 * kGiB);
}

TEST_CASE("v1: nested limits, reclaimable page cache and no limit") {
  const Machine machine(100 * kGiB);
  machine.process_in("11:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/docker/abc\n0::/\n");
  machine.v1("", "9223372036854771712", 50 * kGiB, 0);
  SUBCASE("only the root") { CHECK_FALSE(machine.room().cgroup.has_value()); }
  SUBCASE("its own") {
    machine.v1("/docker/abc", std::to_string(8 * kGiB), 5 * kGiB, kGiB);
    CHECK(machine.room().available == 4 * kGiB);
  }
  SUBCASE("an ancestor's") {
    machine.v1("/docker/abc", "9223372036854771712", 5 * kGiB, kGiB);
    machine.v1("/docker", std::to_string(6 * kGiB), 5 * kGiB, kGiB);
    CHECK(machine.room().available == 2 * kGiB);
  }
  SUBCASE("another controller's path is not the process's") {
    machine.v1("/elsewhere", std::to_string(kGiB), 0, 0);
    CHECK(machine.room().available == 100 * kGiB);
  }
}

TEST_CASE("files that are missing or make no sense") {
  const Machine machine(100 * kGiB);
  machine.process_in("0::/job\n");
  SUBCASE("a limit alone still limits") {
    machine.files().write("cgroup/job/memory.max", text(2 * kGiB));
    CHECK(machine.room().available == 2 * kGiB);
  }
  SUBCASE("usage above the limit leaves nothing") {
    machine.v2("/job", std::to_string(kGiB), 2 * kGiB, 0);
    CHECK(machine.room().available == 0);
  }
  SUBCASE("page cache above the usage frees no more than the limit") {
    machine.v2("/job", std::to_string(kGiB), kMiB, 5 * kGiB);
    CHECK(machine.room().available == kGiB);
  }
  SUBCASE("empty and unreadable") {
    machine.files().write("cgroup/job/memory.max", "");
    machine.files().write("cgroup/memory.max", "many\n");
    CHECK(machine.room().available == 100 * kGiB);
  }
}

TEST_CASE("check_room keeps headroom for the rest of the process") {
  SUBCASE("a floor on small machines") {
    const Machine machine(kGiB);
    CHECK_NOTHROW(machine.limits().check_room(kGiB - 256 * kMiB));
    CHECK_THROWS_AS(machine.limits().check_room(kGiB - 256 * kMiB + 1), ArenaFullError);
  }
  SUBCASE("a share on large ones") {
    const Machine machine(1000 * kGiB);
    CHECK_NOTHROW(machine.limits().check_room(980 * kGiB));
    CHECK_THROWS_AS(machine.limits().check_room(980 * kGiB + kMiB), ArenaFullError);
  }
  SUBCASE("half of it once memory is being touched") {
    const Machine machine(kGiB);
    CHECK_NOTHROW(machine.limits().recheck_room(kGiB - 128 * kMiB));
    CHECK_THROWS_AS(machine.limits().recheck_room(kGiB - 128 * kMiB + 1), ArenaFullError);
  }
  SUBCASE("no room at all") {
    const Machine machine(kMiB);
    CHECK_THROWS_AS(machine.limits().check_room(1), ArenaFullError);
    CHECK_THROWS_AS(machine.limits().check_room(kUnlimited), ArenaFullError);
  }
}

TEST_CASE("the refusal has the numbers and says what to do") {
  const Machine machine(64 * kGiB);
  machine.process_in("0::/job\n");
  machine.v2("/job", std::to_string(16 * kGiB), 6 * kGiB, 2 * kGiB);
  const std::string message = refusal(machine.limits(), 20 * kGiB);
  CAPTURE(message);
  CHECK(has(message, "20.00 GiB (21474836480 bytes)"));
  CHECK(has(message, "MemAvailable is 64.00 GiB"));
  CHECK(has(message, "limit is 16.00 GiB"));
  CHECK(has(message, "6.00 GiB in use"));
  CHECK(has(message, "2.00 GiB can be reclaimed"));
  CHECK(has(message, "/job/memory.max"));
  CHECK(has(message, "256.00 MiB of it is kept"));
  CHECK(has(message, "at most 11.75 GiB"));
  CHECK(has(message, "raise the memory limit of the container"));
  CHECK(has(refusal(Machine(kGiB).limits(), 20 * kGiB), "no cgroup limit"));
}

TEST_CASE("this machine can be asked") {
  const HostRoom room = MemoryLimits().room();
  REQUIRE(room.mem_available.has_value());
  CHECK(room.available > 0);
  CHECK(room.available <= *room.mem_available);
  CHECK(has(shardsnap::describe_memlock_limit(), "RLIMIT_MEMLOCK is "));
}

TEST_CASE("bytes for people") {
  CHECK(format_bytes(0) == "0 bytes");
  CHECK(format_bytes(1023) == "1023 bytes");
  CHECK(format_bytes(4096) == "4.00 KiB");
  CHECK(format_bytes(kGiB + kGiB / 2) == "1.50 GiB");
  CHECK(format_bytes(kUnlimited) == "16.00 EiB");
}
