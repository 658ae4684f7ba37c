// What a copy engine offers: two copy streams, one a direction, events, and ordering against the caller's stream.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace shardsnap {

enum class Direction { kDeviceToHost, kHostToDevice };

// A stream that the caller owns: a CUstream as an integer, 0 for the legacy default stream. On a CPU device the host
// is the caller's stream and the value is ignored.
using CallerStream = std::uintptr_t;

// One contiguous copy: device bytes at an absolute address, host bytes at an offset from the snapshot's base.
struct CopyRange {
  std::uintptr_t device = 0;
  std::size_t host_offset = 0;
  std::size_t bytes = 0;
};

// Shared, because an asynchronous copy reads the ranges after submit() has returned.
using CopyRanges = std::shared_ptr<const std::vector<CopyRange>>;

// A point in a copy stream. Owned by whoever holds the pointer; it may outlive the device that recorded it.
class Event {
 public:
  Event() = default;
  virtual ~Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Not blocking. True once everything before the event has completed. Throws CopyError if that work failed.
  [[nodiscard]] virtual bool done() const = 0;

  // Blocks the host for at most `timeout`; returns done(). Throws CopyError if the work before the event failed.
  [[nodiscard]] virtual bool wait(std::chrono::nanoseconds timeout) const = 0;
};
using EventPtr = std::shared_ptr<const Event>;

// Thread-safe. Nothing here blocks the host but drain(), register_host() and destruction (which drains).
class CopyDevice {
 public:
  CopyDevice() = default;
  virtual ~CopyDevice() = default;
  CopyDevice(const CopyDevice&) = delete;
  CopyDevice& operator=(const CopyDevice&) = delete;

  // For messages and reports: "cpu (2 copy threads)", "cuda:0 (NVIDIA H200, driver 13.0)".
  [[nodiscard]] virtual std::string describe() const = 0;

  // Later copies of `direction` start only after the work now on the caller's stream.
  virtual void order_after_caller(Direction direction, CallerStream caller) = 0;

  // Later copies of `direction` start only after `event`, which this device recorded.
  virtual void order_after(Direction direction, const EventPtr& event) = 0;

  // Later work on the caller's stream starts only after `event`. The host is not blocked; on a CPU device this does
  // nothing, because there the caller's stream is the host and the caller waits on the event itself.
  virtual void order_caller_after(CallerStream caller, const EventPtr& event) = 0;

  // Enqueues every range on the copy stream of `direction`, in order of the stream, in any order within the call.
  // The host bytes at host_base stay valid until the copies are done (the caller's duty). On CopyError some of the
  // ranges may have been enqueued: drain() before the memory is freed.
  virtual void submit(Direction direction, const CopyRanges& ranges, std::byte* host_base) = 0;

  // Marks the end of all that is enqueued so far on the copy stream of `direction`.
  [[nodiscard]] virtual EventPtr record(Direction direction) = 0;

  // Blocks until both copy streams are idle or have failed.
  virtual void drain() noexcept = 0;

  // True if host memory can be pinned for this device.
  [[nodiscard]] virtual bool can_register() const = 0;

  // Pins [address, address + bytes). Blocks. Throws PinningError with the driver's name for the reason.
  virtual void register_host(void* address, std::size_t bytes) = 0;
  virtual void unregister_host(void* address) noexcept = 0;

  // NUMA node nearest to the device, or -1 where it is unknown or there is only one.
  [[nodiscard]] virtual int numa_node() const = 0;
};

}  // namespace shardsnap
