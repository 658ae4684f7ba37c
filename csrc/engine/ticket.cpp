#include "engine/ticket.hpp"

#include <utility>

#include "errors.hpp"

namespace shardsnap {

Ticket::Ticket(EventPtr event, std::shared_ptr<const void> memory, std::size_t bytes)
    : event_(std::move(event)), bytes_(bytes), memory_(std::move(memory)) {}

bool Ticket::done() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) {
      return true;
    }
  }
  try {
    if (!event_->done()) {
      return false;
    }
    settle(std::nullopt);
  } catch (const CopyError& failure) {
    settle(failure.what());
  }
  return true;
}

bool Ticket::wait(std::chrono::nanoseconds timeout) {
  if (!done()) {
    try {
      if (!event_->wait(timeout)) {
        return false;
      }
      settle(std::nullopt);
    } catch (const CopyError& failure) {
      settle(failure.what());
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) {
    throw CopyError(*failure_);
  }
  return true;
}

std::optional<std::string> Ticket::error() {
  if (!done()) {
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Ticket::settle(std::optional<std::string> failure) {
  std::shared_ptr<const void> released;  // freed after the lock: giving back a slab may take milliseconds
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_) {
    ended_ = true;
    failure_ = std::move(failure);
    released.swap(memory_);
  }
}

}  // namespace shardsnap
