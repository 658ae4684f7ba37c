#include "engine/ticket.hpp"

#include <utility>

#include "errors.hpp"

namespace shardsnap {

Ticket::Ticket(EventPtr event, std::shared_ptr<const void> memory, std::size_t bytes)
    : bytes_(bytes), event_(std::move(event)), memory_(std::move(memory)) {}

bool Ticket::done() {
  const EventPtr event = pending();
  if (event == nullptr) {
    return true;
  }
  try {
    if (!event->done()) {
      return false;
    }
    settle(std::nullopt);
  } catch (const CopyError& failure) {
    settle(failure.what());
  }
  return true;
}

bool Ticket::wait(std::chrono::nanoseconds timeout) {
  if (const EventPtr event = pending()) {
    try {
      if (!event->wait(timeout)) {
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

EventPtr Ticket::pending() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return event_;
}

void Ticket::settle(std::optional<std::string> failure) {
  // Freed after the lock: giving back a slab may take milliseconds.
  std::shared_ptr<const void> memory;
  EventPtr event;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (event_ != nullptr) {
    failure_ = std::move(failure);
    memory.swap(memory_);
    event.swap(event_);
  }
}

}  // namespace shardsnap
