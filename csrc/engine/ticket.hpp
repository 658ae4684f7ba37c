// A ticket: one copy in flight. It keeps the host memory of the copy alive until the copy has ended, and no longer: a
// ticket that is kept after that holds nothing of the arena or the device.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "device/copy_device.hpp"

namespace shardsnap {

// Thread-safe.
class Ticket {
 public:
  // memory: whatever must outlive the copy; dropped once the copy has ended, well or badly.
  Ticket(EventPtr event, std::shared_ptr<const void> memory, std::size_t bytes);

  // Not blocking. True once the copy has ended, well or badly.
  [[nodiscard]] bool done();

  // Blocks the host for at most `timeout`; false when the copy is still in flight. Throws CopyError if it failed.
  [[nodiscard]] bool wait(std::chrono::nanoseconds timeout);

  // Not blocking. Why the copy failed, once that is known.
  [[nodiscard]] std::optional<std::string> error();

  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  // Null once the copy is known to have ended.
  [[nodiscard]] EventPtr pending();

  // Keeps the outcome, and lets go of the memory and the event.
  void settle(std::optional<std::string> failure);

  const std::size_t bytes_;
  std::mutex mutex_;
  EventPtr event_;
  std::shared_ptr<const void> memory_;
  std::optional<std::string> failure_;
};

}  // namespace shardsnap
