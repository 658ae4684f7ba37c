// The errors that the C++ core raises; bindings.cpp turns each into the Python class of the same name.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardsnap {

class SnapshotError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// No room: in the arena, or on the host before the arena's memory was touched. Sizes are bytes.
class ArenaFullError : public SnapshotError {
 public:
  ArenaFullError(const std::string& message, std::size_t asked, std::size_t free, std::size_t largest_free)
      : SnapshotError(message), asked_(asked), free_(free), largest_free_(largest_free) {}

  [[nodiscard]] std::size_t asked() const { return asked_; }
  [[nodiscard]] std::size_t free() const { return free_; }
  [[nodiscard]] std::size_t largest_free() const { return largest_free_; }

 private:
  std::size_t asked_;
  std::size_t free_;
  std::size_t largest_free_;
};

// The driver refused to pin host memory.
class PinningError : public SnapshotError {
 public:
  using SnapshotError::SnapshotError;
};

// A copy, or a driver call that a copy needs, failed.
class CopyError : public SnapshotError {
 public:
  using SnapshotError::SnapshotError;
};

// The device cannot be used on this machine: no driver, no such device, or the driver does not start.
class DeviceUnavailableError : public SnapshotError {
 public:
  using SnapshotError::SnapshotError;
};

}  // namespace shardsnap
