// Streams as host threads, and the events that order them.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace shardsnap::emulator {

// One recorded point on a stream's time line.
class Completion {
 public:
  void finish();
  void wait() const;
  [[nodiscard]] bool finished() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable finished_changed_;
  bool finished_ = false;
};

// Runs its work in the order given, on a thread of its own.
class Stream {
 public:
  using Work = std::function<void()>;

  Stream();
  // Returns at once; what is queued still runs, as after cuStreamDestroy.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void enqueue(Work work);

  // A point after everything that is queued now.
  [[nodiscard]] std::shared_ptr<const Completion> mark();

  // Blocks the host until everything that is queued now has run.
  void synchronize();

 private:
  class Queue;
  std::shared_ptr<Queue> queue_;
};

// What a CUevent refers to: the point where it was recorded last, which is what a wait or a query captures.
class StreamEvent {
 public:
  void record(Stream& stream);

  // Null before the first record.
  [[nodiscard]] std::shared_ptr<const Completion> latest() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Completion> latest_;
};

}  // namespace shardsnap::emulator
