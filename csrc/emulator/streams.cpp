#include "emulator/streams.hpp"

#include <deque>
#include <thread>
#include <utility>

namespace shardsnap::emulator {

void Completion::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  finished_ = true;
  finished_changed_.notify_all();
}

void Completion::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  finished_changed_.wait(lock, [this] { return finished_; });
}

bool Completion::finished() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_;
}

// Shared by the stream and its thread, so that the thread can finish what is queued after the stream is gone.
class Stream::Queue {
 public:
  void push(Work work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(std::move(work));
    changed_.notify_one();
  }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_one();
  }

  void run() {
    while (Work work = pop()) {
      work();
    }
  }

 private:
  // Empty once the queue is closed and all of it has run.
  Work pop() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !works_.empty(); });
    if (works_.empty()) {
      return {};
    }
    Work work = std::move(works_.front());
    works_.pop_front();
    return work;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> works_;
  bool closed_ = false;
};

Stream::Stream() : queue_(std::make_shared<Queue>()) {
  std::thread([queue = queue_] { queue->run(); }).detach();
}

Stream::~Stream() { queue_->close(); }

void Stream::enqueue(Work work) { queue_->push(std::move(work)); }

std::shared_ptr<const Completion> Stream::mark() {
  auto completion = std::make_shared<Completion>();
  enqueue([completion] { completion->finish(); });
  return completion;
}

void Stream::synchronize() { mark()->wait(); }

void StreamEvent::record(Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  latest_ = stream.mark();
}

std::shared_ptr<const Completion> StreamEvent::latest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return latest_;
}

}  // namespace shardsnap::emulator
