// Save and restore: copies between a model's weights on one device and extents of the arena, in a safe order.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include "device/copy_device.hpp"
#include "engine/copy_plan.hpp"
#include "engine/ticket.hpp"
#include "memory/arena.hpp"

namespace shardsnap {

// Thread-safe. Every copy is ordered after the caller's stream and after the copies before it that touch the same
// bytes: a restore waits for the saves that still read the weights, a save for the restores that still write them.
class SnapshotEngine {
 public:
  explicit SnapshotEngine(std::shared_ptr<CopyDevice> device);

  // Waits for every copy in flight.
  ~SnapshotEngine();
  SnapshotEngine(const SnapshotEngine&) = delete;
  SnapshotEngine& operator=(const SnapshotEngine&) = delete;

  // Copies the plan's device bytes to `extent` (from its byte `base` on). Does not block the host. With hold_caller the
  // caller's stream waits for the copies; without, somebody must fence() before the weights are written. Throws
  // CopyError, in which case nothing is in flight any more, and std::out_of_range if the extent is too small.
  std::shared_ptr<Ticket> save(const CopyPlan& plan, const std::shared_ptr<Extent>& extent, std::size_t base,
                               CallerStream caller, bool hold_caller);

  // Copies the bytes of `extent` back. The caller's stream waits for the copies. Does not block the host. Throws
  // CopyError: copies that were already enqueued have ended, and the weights may be mixed.
  std::shared_ptr<Ticket> restore(const CopyPlan& plan, const std::shared_ptr<Extent>& extent, std::size_t base,
                                  CallerStream caller);

  // Later work on the caller's stream waits for every save in flight. On a CPU device nothing happens here: the caller
  // waits on the tickets.
  void fence(CallerStream caller);

  // Blocks until nothing is in flight.
  void drain() noexcept;

  // Copies not known to have ended.
  [[nodiscard]] std::size_t in_flight();

  [[nodiscard]] const std::shared_ptr<CopyDevice>& device() const { return device_; }

 private:
  std::shared_ptr<Ticket> enqueue(Direction direction, const CopyPlan& plan, const std::shared_ptr<Extent>& extent,
                                  std::size_t base, CallerStream caller, bool hold_caller);
  void reap();

  const std::shared_ptr<CopyDevice> device_;
  std::mutex mutex_;
  EventPtr last_read_;                           // the newest save of live weights
  EventPtr last_write_;                          // the newest restore into them
  std::deque<std::shared_ptr<Ticket>> tickets_;  // keeps memory alive for copies whose ticket the user dropped
};

}  // namespace shardsnap
