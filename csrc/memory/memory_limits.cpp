#include "memory/memory_limits.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace shardsnap {
namespace {

constexpr std::size_t kSmallestHeadroom = std::size_t{256} << 20;
constexpr std::size_t kHeadroomDivisor = 50;                // 2%
constexpr std::size_t kNoLimitFrom = std::size_t{1} << 60;  // v1 writes the largest page count for "no limit"

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* reclaimable;  // a line of memory.stat that covers the cgroup's children too
};

constexpr CgroupFiles kV2Files{"memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kV1Files{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

std::optional<std::size_t> parse_number(const std::string& text) {
  std::size_t value = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  return read.ec == std::errc() ? std::optional(value) : std::nullopt;
}

std::optional<std::size_t> number_in_file(const std::string& path) {
  std::string word;
  std::ifstream file(path);
  file >> word;
  return parse_number(word);
}

// The number that follows `key` at the start of a line.
std::optional<std::size_t> number_after_key(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    std::string value;
    if (words >> name >> value && name == key) {
      return parse_number(value);
    }
  }
  return std::nullopt;
}

std::size_t saturating_multiply(std::size_t value, std::size_t factor) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  return value > most / factor ? most : value * factor;
}

std::optional<std::size_t> mem_available(const std::string& proc) {
  const auto kibibytes = number_after_key(proc + "/meminfo", "MemAvailable:");
  return kibibytes ? std::optional(saturating_multiply(*kibibytes, 1024)) : std::nullopt;
}

struct CgroupPaths {
  std::string v1 = "/";
  std::string v2 = "/";
};

bool lists_memory(const std::string& controllers) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "memory") {
      return true;
    }
  }
  return false;
}

CgroupPaths cgroup_paths(const std::string& proc) {
  CgroupPaths paths;
  std::ifstream file(proc + "/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string hierarchy;
    std::string controllers;
    std::string path;
    std::getline(fields, hierarchy, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    if (hierarchy == "0" && controllers.empty()) {
      paths.v2 = path;
    } else if (lists_memory(controllers)) {
      paths.v1 = path;
    }
  }
  return paths;
}

// The cgroup and its ancestors up to the mount's root. A container may see only its own cgroup, as the root, while the
// path is the host's: levels that do not exist have no files and so no say.
std::vector<std::string> cgroup_levels(const std::string& mount, std::string path) {
  std::vector<std::string> levels;
  // A process outside its cgroup namespace has a path like "/../other", which would lead out of the mount.
  if (path.find("..") != std::string::npos) {
    path.clear();
  }
  while (!path.empty() && path != "/") {
    levels.push_back(mount + path);
    path.erase(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
  levels.push_back(mount);
  return levels;
}

std::optional<CgroupRoom> cgroup_room(const std::string& directory, const CgroupFiles& files) {
  const std::string limit_file = directory + "/" + files.limit;
  const auto limit = number_in_file(limit_file);
  if (!limit || *limit >= kNoLimitFrom) {
    return std::nullopt;
  }
  return CgroupRoom{limit_file, *limit, number_in_file(directory + "/" + files.usage).value_or(0),
                    number_after_key(directory + "/memory.stat", files.reclaimable).value_or(0)};
}

void keep_tightest(std::optional<CgroupRoom>& tightest, const std::string& mount, const std::string& path,
                   const CgroupFiles& files) {
  for (const std::string& level : cgroup_levels(mount, path)) {
    auto room = cgroup_room(level, files);
    if (room && (!tightest || room->available() < tightest->available())) {
      tightest = std::move(room);
    }
  }
}

void require_room(const HostRoom& room, std::size_t bytes, std::size_t headroom, const char* moment) {
  const std::size_t usable = room.available - std::min(room.available, headroom);
  if (bytes <= usable) {
    return;
  }
  std::ostringstream message;
  message << "too little host memory for " << format_bytes(bytes) << " (" << bytes << " bytes) " << moment << ": "
          << room.describe() << "; " << format_bytes(headroom)
          << " of it is kept for the rest of the process, so at most " << format_bytes(usable)
          << " can be taken. Ask for a smaller capacity or fewer snapshots, count every rank on this host, or raise "
          << (room.cgroup && room.cgroup->available() == room.available ? "the memory limit of the container or job."
                                                                        : "the memory of the host.");
  throw ArenaFullError(message.str(), bytes, usable, usable);
}

std::string describe_limit(rlim_t limit) { return limit == RLIM_INFINITY ? "unlimited" : format_bytes(limit); }

}  // namespace

std::size_t CgroupRoom::available() const {
  const std::size_t held = usage - std::min(usage, reclaimable);
  return limit - std::min(limit, held);
}

// Page tables and the driver's own lists grow with the slab, hence a share; a small process still needs a floor for
// Python, torch and the prefaulting threads.
std::size_t HostRoom::headroom() const { return std::max(kSmallestHeadroom, available / kHeadroomDivisor); }

std::string HostRoom::describe() const {
  std::string text = "MemAvailable is " + (mem_available ? format_bytes(*mem_available) : "unknown");
  if (!cgroup) {
    return text + ", no cgroup limit";
  }
  return text + ", the cgroup limit is " + format_bytes(cgroup->limit) + " with " + format_bytes(cgroup->usage) +
         " in use, of which " + format_bytes(cgroup->reclaimable) + " can be reclaimed (" + cgroup->limit_file + ")";
}

MemoryLimits::MemoryLimits(MemoryRoots roots) : roots_(std::move(roots)) {}

HostRoom MemoryLimits::room() const {
  HostRoom room;
  room.mem_available = mem_available(roots_.proc);
  const CgroupPaths paths = cgroup_paths(roots_.proc);
  keep_tightest(room.cgroup, roots_.cgroup, paths.v2, kV2Files);
  keep_tightest(room.cgroup, roots_.cgroup + "/unified", paths.v2, kV2Files);
  keep_tightest(room.cgroup, roots_.cgroup + "/memory", paths.v1, kV1Files);
  if (room.mem_available) {
    room.available = *room.mem_available;
  }
  if (room.cgroup) {
    room.available = std::min(room.available, room.cgroup->available());
  }
  return room;
}

void MemoryLimits::check_room(std::size_t bytes) const {
  const HostRoom now = room();
  require_room(now, bytes, now.headroom(), "before any of it is touched");
}

void MemoryLimits::recheck_room(std::size_t bytes) const {
  const HostRoom now = room();
  // Half: the kernel's counters lag and page tables have come on top, which must not fail what just passed.
  require_room(now, bytes, now.headroom() / 2, "still to be touched, because other processes took memory meanwhile");
}

std::string format_bytes(std::size_t bytes) {
  constexpr std::array<const char*, 6> units{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) {
    return std::to_string(bytes) + " bytes";
  }
  auto value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << value << ' ' << units[unit];
  return text.str();
}

std::string describe_memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    return "RLIMIT_MEMLOCK is unknown";
  }
  return "RLIMIT_MEMLOCK is " + describe_limit(limit.rlim_cur) + " (hard limit " + describe_limit(limit.rlim_max) + ")";
}

}  // namespace shardsnap
