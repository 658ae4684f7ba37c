#include "emulator/contexts.hpp"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <iterator>

namespace shardsnap::emulator {
namespace {

constexpr std::size_t kContextStackDepth = 64;

// Trivially destructible, because objects that die at exit still call in after a thread's locals are destroyed.
struct ContextStack {
  std::array<cuda::Context, kContextStackDepth> contexts;
  std::size_t depth;
};

ContextStack& context_stack() {
  thread_local ContextStack stack{};
  return stack;
}

}  // namespace

std::uintptr_t next_handle() {
  static std::atomic<std::uintptr_t> last{0x1000};
  return last += 0x10;
}

std::shared_ptr<Stream> Context::find_stream(cuda::Stream handle) const {
  return is_legacy(handle) ? legacy_stream_ : streams.find(handle);
}

bool Context::is_legacy(cuda::Stream handle) {
  return handle == nullptr || reinterpret_cast<std::uintptr_t>(handle) == cuda::kLegacyStreamHandle;
}

void Context::synchronize() {
  legacy_stream_->synchronize();
  for (const auto& stream : streams.all()) {
    stream->synchronize();
  }
}

cuda::Result HostRegistrations::add(cuda::Context owner, void* address, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t end = begin + bytes;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto next = ranges_.lower_bound(begin);
  const bool meets_next = next != ranges_.end() && next->first < end;
  const bool meets_previous = next != ranges_.begin() && std::prev(next)->second.end > begin;
  if (meets_next || meets_previous) {
    return cuda::kHostMemoryAlreadyRegistered;
  }
  ranges_.emplace(begin, Range{end, owner});
  return cuda::kSuccess;
}

cuda::Result HostRegistrations::remove(void* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool removed = ranges_.erase(reinterpret_cast<std::uintptr_t>(address)) != 0;
  return removed ? cuda::kSuccess : cuda::kHostMemoryNotRegistered;
}

std::size_t HostRegistrations::remove_all_of(cuda::Context owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t removed = 0;
  for (auto range = ranges_.begin(); range != ranges_.end();) {
    if (range->second.owner == owner) {
      range = ranges_.erase(range);
      ++removed;
    } else {
      ++range;
    }
  }
  return removed;
}

std::size_t HostRegistrations::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ranges_.size();
}

Driver& Driver::instance() {
  static Driver& driver = *std::make_unique<Driver>().release();
  return driver;
}

cuda::Result Driver::initialise() {
  if (shut_down_) {
    return cuda::kDeinitialized;
  }
  if (process_ != 0 && process_ != getpid()) {
    return cuda::kNotInitialized;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  settings_ = Settings::from_environment();
  if (settings_.init_result != cuda::kSuccess) {
    return settings_.init_result;
  }
  if (settings_.devices == 0) {
    return cuda::kNoDevice;
  }
  if (process_ == 0) {
    process_ = getpid();
    return std::atexit([] { instance().shut_down_ = true; }) == 0 ? cuda::kSuccess : cuda::kOperatingSystem;
  }
  return cuda::kSuccess;
}

cuda::Result Driver::readiness() const {
  if (shut_down_) {
    return cuda::kDeinitialized;
  }
  return process_ == getpid() ? cuda::kSuccess : cuda::kNotInitialized;
}

Settings Driver::settings() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return settings_;
}

cuda::Result Driver::retain(cuda::Device device, cuda::Context* context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device < 0 || device >= settings_.devices) {
    return cuda::kInvalidDevice;
  }
  PrimaryContext& primary = primaries_[device];
  if (primary.references == 0) {
    primary.handle = contexts_.add(std::make_shared<Context>());
  }
  ++primary.references;
  *context = primary.handle;
  return cuda::kSuccess;
}

cuda::Result Driver::release(cuda::Device device) {
  cuda::Context handle = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto primary = primaries_.find(device);
    if (primary == primaries_.end() || primary->second.references == 0) {
      return cuda::kInvalidContext;
    }
    if (--primary->second.references > 0) {
      return cuda::kSuccess;
    }
    handle = primary->second.handle;
  }
  // Outside the lock: the context's streams may run host functions that call the driver.
  take_down(handle, *contexts_.find(handle));
  return cuda::kSuccess;
}

cuda::Result Driver::push(cuda::Context context) {
  if (contexts_.find(context) == nullptr) {
    return cuda::kInvalidContext;
  }
  ContextStack& stack = context_stack();
  if (stack.depth == kContextStackDepth) {
    return cuda::kOutOfMemory;
  }
  stack.contexts[stack.depth++] = context;
  return cuda::kSuccess;
}

cuda::Result Driver::pop(cuda::Context* context) {
  ContextStack& stack = context_stack();
  if (stack.depth == 0) {
    return cuda::kInvalidContext;
  }
  --stack.depth;
  if (context != nullptr) {
    *context = stack.contexts[stack.depth];
  }
  return cuda::kSuccess;
}

std::pair<cuda::Context, std::shared_ptr<Context>> Driver::current() const {
  const ContextStack& stack = context_stack();
  if (stack.depth == 0) {
    return {nullptr, nullptr};
  }
  const cuda::Context top = stack.contexts[stack.depth - 1];
  return {top, contexts_.find(top)};
}

Counts Driver::counts() const {
  Counts counts{};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& primary : primaries_) {
      counts.context_references += primary.second.references;
    }
  }
  for (const auto& context : contexts_.all()) {
    counts.streams += context->streams.size();
    counts.events += context->events.size();
  }
  counts.registrations = registrations.size();
  counts.orphans = orphans_;
  counts.batch_calls = copies.batch_calls;
  counts.batch_copies = copies.batch_copies;
  counts.single_copies = copies.single_copies;
  return counts;
}

void Driver::take_down(cuda::Context handle, Context& context) {
  context.synchronize();
  orphans_ += context.streams.size() + context.events.size() + registrations.remove_all_of(handle);
  contexts_.remove(handle);
}

}  // namespace shardsnap::emulator
