#include "device/cpu_device.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "device/streaming_copy.hpp"
#include "errors.hpp"
#include "memory_bound_threads.hpp"

namespace shardsnap {
namespace {

constexpr std::size_t kClaimBytes = std::size_t{1} << 20;  // a worker takes about this much at a time

constexpr std::chrono::nanoseconds kLongestWait = std::chrono::hours(24 * 365);  // now + more overflows

class CpuEvent;

// One step of a stream: wait for an event, copy ranges, or set an event.
struct Job {
  std::shared_ptr<const CpuEvent> wait_for;
  CopyRanges ranges;
  std::byte* host = nullptr;
  std::shared_ptr<CpuEvent> signal;
  bool streaming = false;
  std::size_t next = 0;     // the first range that no worker has claimed
  std::size_t claimed = 0;  // claims that are still being copied
};

// Shared by a device, its workers and its events, so that an event may outlive the device.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<std::deque<Job>, 2> streams;
  std::vector<std::thread> workers;
  const pid_t process = getpid();

  // Set in a fork, to itself, so that nothing here is ever destroyed: the workers stayed in the parent, perhaps in the
  // middle of a change to a stream or in the condition variable, which would wait for them to leave it; and joining or
  // detaching them would do so to new threads that lie where they lay.
  std::shared_ptr<Shared> immortal;

  // Asked before the lock, which a worker may have held at the fork.
  [[nodiscard]] bool is_forked() const { return getpid() != process; }
  void refuse_fork() const {
    if (is_forked()) {
      throw CopyError("the copy threads belong to the process that created the service; this is a fork of it");
    }
  }
};

class CpuEvent final : public Event {
 public:
  explicit CpuEvent(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  [[nodiscard]] bool done() const override {
    if (!done_) {
      shared_->refuse_fork();  // there it is never done
    }
    return done_;
  }

  [[nodiscard]] bool wait(std::chrono::nanoseconds timeout) const override {
    if (done()) {
      return true;
    }
    std::unique_lock<std::mutex> lock(shared_->mutex);
    return shared_->changed.wait_for(lock, std::min(timeout, kLongestWait), [this] { return is_set(); });
  }

  // With Shared::mutex held, so that a wait does not miss it.
  void set() { done_ = true; }
  [[nodiscard]] bool is_set() const { return done_; }
  [[nodiscard]] bool is_of(const Shared& shared) const { return shared_.get() == &shared; }

 private:
  std::shared_ptr<Shared> shared_;
  std::atomic<bool> done_{false};
};

// What one worker copies at a time.
struct Claim {
  Direction direction = Direction::kDeviceToHost;
  const CopyRange* first = nullptr;
  const CopyRange* last = nullptr;
  std::byte* host = nullptr;
  bool streaming = false;
};

void copy_claim(const Claim& claim) {
  for (const CopyRange* range = claim.first; range != claim.last; ++range) {
    auto* const device = reinterpret_cast<std::byte*>(range->device);
    std::byte* const host = claim.host + range->host_offset;
    const bool to_host = claim.direction == Direction::kDeviceToHost;
    std::byte* const destination = to_host ? host : device;
    const std::byte* const source = to_host ? device : host;
    if (claim.streaming && range->bytes >= kStreamingRangeBytes) {
      copy_streaming(destination, source, range->bytes);
    } else {
      std::memcpy(destination, source, range->bytes);
    }
  }
  if (claim.streaming) {
    streaming_fence();
  }
}

std::size_t total_bytes(const std::vector<CopyRange>& ranges) {
  std::size_t bytes = 0;
  for (const CopyRange& range : ranges) {
    bytes += range.bytes;
  }
  return bytes;
}

class CpuDevice final : public CopyDevice {
 public:
  explicit CpuDevice(unsigned threads) : shared_(std::make_shared<Shared>()) {
    const unsigned count = threads != 0 ? threads : memory_bound_threads();
    shared_->workers.reserve(count);
    try {
      while (shared_->workers.size() < count) {
        shared_->workers.emplace_back([this] { work(); });
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  ~CpuDevice() override {
    if (shared_->is_forked()) {
      shared_->immortal = shared_;
      return;
    }
    drain();
    stop();
  }

  CpuDevice(const CpuDevice&) = delete;
  CpuDevice& operator=(const CpuDevice&) = delete;

  [[nodiscard]] std::string describe() const override {
    return "cpu (" + std::to_string(shared_->workers.size()) + " copy threads, " + streaming_copy_isa() + ")";
  }

  // The host is the caller's stream: whatever it did before this call has happened.
  void order_after_caller(Direction /*direction*/, CallerStream /*caller*/) override {}
  void order_caller_after(CallerStream /*caller*/, const EventPtr& /*event*/) override {}

  void order_after(Direction direction, const EventPtr& event) override {
    auto waited = std::dynamic_pointer_cast<const CpuEvent>(event);
    if (waited == nullptr || !waited->is_of(*shared_)) {
      throw CopyError("an event of another device cannot order a cpu copy stream");
    }
    Job job;
    job.wait_for = std::move(waited);
    push(direction, std::move(job));
  }

  void submit(Direction direction, const CopyRanges& ranges, std::byte* host_base) override {
    if (ranges->empty()) {
      return;
    }
    Job job;
    job.streaming = total_bytes(*ranges) >= kStreamingBatchBytes;
    job.ranges = ranges;
    job.host = host_base;
    push(direction, std::move(job));
  }

  [[nodiscard]] EventPtr record(Direction direction) override {
    auto event = std::make_shared<CpuEvent>(shared_);
    Job job;
    job.signal = event;
    push(direction, std::move(job));
    return event;
  }

  void drain() noexcept override {
    if (shared_->is_forked()) {
      return;
    }
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->changed.wait(lock, [this] { return shared_->streams[0].empty() && shared_->streams[1].empty(); });
  }

  [[nodiscard]] bool can_register() const override { return false; }
  void register_host(void* /*address*/, std::size_t /*bytes*/) override {
    throw PinningError("there is nothing to pin host memory for: the model is on the CPU");
  }
  void unregister_host(void* /*address*/) noexcept override {}
  [[nodiscard]] int numa_node() const override { return -1; }

 private:
  void push(Direction direction, Job job) {
    shared_->refuse_fork();
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      shared_->streams[index(direction)].push_back(std::move(job));
      settle();
    }
    shared_->changed.notify_all();
  }

  static std::size_t index(Direction direction) { return direction == Direction::kDeviceToHost ? 0 : 1; }

  // Retires every leading step that needs no worker. With the mutex held; true if anything changed.
  bool settle() {
    bool changed = false;
    for (bool progress = true; progress;) {
      progress = false;
      for (std::deque<Job>& stream : shared_->streams) {
        while (!stream.empty() && retire(stream.front())) {
          stream.pop_front();
          progress = true;
        }
      }
      changed = changed || progress;
    }
    return changed;
  }

  static bool retire(Job& job) {
    if (job.wait_for != nullptr) {
      return job.wait_for->is_set();
    }
    if (job.ranges != nullptr) {
      return job.next == job.ranges->size() && job.claimed == 0;
    }
    job.signal->set();
    return true;
  }

  // With the mutex held. The Job stays where it is: a deque keeps references across push_back and pop_front of others.
  bool take(Claim& claim, Job*& owner) {
    for (std::size_t stream = 0; stream != shared_->streams.size(); ++stream) {
      if (shared_->streams[stream].empty()) {
        continue;
      }
      Job& job = shared_->streams[stream].front();
      if (job.ranges == nullptr || job.next == job.ranges->size()) {
        continue;
      }
      const std::vector<CopyRange>& ranges = *job.ranges;
      const std::size_t first = job.next;
      for (std::size_t bytes = 0; job.next != ranges.size() && bytes < kClaimBytes; ++job.next) {
        bytes += ranges[job.next].bytes;
      }
      ++job.claimed;
      claim = {stream == 0 ? Direction::kDeviceToHost : Direction::kHostToDevice, ranges.data() + first,
               ranges.data() + job.next, job.host, job.streaming};
      owner = &job;
      return true;
    }
    return false;
  }

  void work() {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    Claim claim;
    Job* owner = nullptr;
    while (true) {
      shared_->changed.wait(lock, [&] { return stopping_ || take(claim, owner); });
      if (owner == nullptr) {
        return;
      }
      lock.unlock();
      copy_claim(claim);
      lock.lock();
      --owner->claimed;
      owner = nullptr;
      if (settle()) {
        shared_->changed.notify_all();
      }
    }
  }

  void stop() noexcept {
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      stopping_ = true;
    }
    shared_->changed.notify_all();
    for (std::thread& worker : shared_->workers) {
      worker.join();
    }
  }

  std::shared_ptr<Shared> shared_;
  bool stopping_ = false;
};

}  // namespace

std::shared_ptr<CopyDevice> make_cpu_device(unsigned threads) { return std::make_shared<CpuDevice>(threads); }

}  // namespace shardsnap
