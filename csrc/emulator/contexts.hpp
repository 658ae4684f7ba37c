// The emulated driver's state: devices, primary contexts and what lives in them, and registered host memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/cuda_abi.hpp"
#include "emulator/counts.hpp"
#include "emulator/settings.hpp"
#include "emulator/streams.hpp"

namespace shardsnap::emulator {

// Never the same twice, so that a stale handle is found out rather than mistaken for a new object.
std::uintptr_t next_handle();

template <typename Handle, typename Object>
class HandleTable {
 public:
  Handle add(std::shared_ptr<Object> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto handle = reinterpret_cast<Handle>(next_handle());
    objects_.emplace(handle, std::move(object));
    return handle;
  }

  // Null where there is no such handle.
  [[nodiscard]] std::shared_ptr<Object> find(Handle handle) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  // False where there is no such handle.
  bool remove(Handle handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return objects_.erase(handle) != 0;
  }

  [[nodiscard]] std::vector<std::shared_ptr<Object>> all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Object>> objects;
    objects.reserve(objects_.size());
    for (const auto& entry : objects_) {
      objects.push_back(entry.second);
    }
    return objects;
  }

  [[nodiscard]] std::size_t size() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return objects_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<Handle, std::shared_ptr<Object>> objects_;
};

class Context {
 public:
  HandleTable<cuda::Stream, Stream> streams;
  HandleTable<cuda::StreamEvent, StreamEvent> events;

  // The stream behind a handle, the legacy default stream included; null where there is none.
  [[nodiscard]] std::shared_ptr<Stream> find_stream(cuda::Stream handle) const;

  [[nodiscard]] static bool is_legacy(cuda::Stream handle);

  // Blocks until every stream is idle.
  void synchronize();

 private:
  std::shared_ptr<Stream> legacy_stream_ = std::make_shared<Stream>();
};

// Registered host ranges of the process; each belongs to the context it was registered in.
class HostRegistrations {
 public:
  cuda::Result add(cuda::Context owner, void* address, std::size_t bytes);
  cuda::Result remove(void* address);

  // Removes what a destroyed context left behind and returns how many.
  std::size_t remove_all_of(cuda::Context owner);

  [[nodiscard]] std::size_t size() const;

 private:
  struct Range {
    std::uintptr_t end;
    cuda::Context owner;
  };

  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Range> ranges_;
};

struct CopyCounters {
  std::atomic<std::uint64_t> batch_calls{0};
  std::atomic<std::uint64_t> batch_copies{0};
  std::atomic<std::uint64_t> single_copies{0};
};

class Driver {
 public:
  Driver() = default;
  ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Never destroyed: stream threads and late callers outlive static destruction.
  static Driver& instance();

  cuda::Result initialise();

  // What every call but cuInit answers before it looks at its arguments. Takes no lock: safe in a forked child.
  [[nodiscard]] cuda::Result readiness() const;

  [[nodiscard]] Settings settings() const;

  cuda::Result retain(cuda::Device device, cuda::Context* context);
  cuda::Result release(cuda::Device device);

  // The calling thread's stack of contexts.
  cuda::Result push(cuda::Context context);
  cuda::Result pop(cuda::Context* context);

  // The handle on top of that stack; null where there is none or its context is gone.
  [[nodiscard]] std::pair<cuda::Context, std::shared_ptr<Context>> current() const;

  [[nodiscard]] Counts counts() const;

  HostRegistrations registrations;
  CopyCounters copies;

 private:
  struct PrimaryContext {
    std::uint64_t references = 0;
    cuda::Context handle = nullptr;
  };

  void take_down(cuda::Context handle, Context& context);

  mutable std::mutex mutex_;
  Settings settings_ = Settings::from_environment();
  std::map<cuda::Device, PrimaryContext> primaries_;
  HandleTable<cuda::Context, Context> contexts_;
  std::atomic<pid_t> process_{0};
  std::atomic<bool> shut_down_{false};
  std::atomic<std::uint64_t> orphans_{0};
};

}  // namespace shardsnap::emulator
