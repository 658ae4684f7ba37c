#include "engine/snapshot_engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardsnap {

SnapshotEngine::SnapshotEngine(std::shared_ptr<CopyDevice> device) : device_(std::move(device)) {}

SnapshotEngine::~SnapshotEngine() { device_->drain(); }

std::shared_ptr<Ticket> SnapshotEngine::save(const CopyPlan& plan, const std::shared_ptr<Extent>& extent,
                                             std::size_t base, CallerStream caller, bool hold_caller) {
  return enqueue(Direction::kDeviceToHost, plan, extent, base, caller, hold_caller);
}

std::shared_ptr<Ticket> SnapshotEngine::restore(const CopyPlan& plan, const std::shared_ptr<Extent>& extent,
                                                std::size_t base, CallerStream caller) {
  return enqueue(Direction::kHostToDevice, plan, extent, base, caller, true);
}

void SnapshotEngine::fence(CallerStream caller) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reap();
  if (last_read_ != nullptr) {
    device_->order_caller_after(caller, last_read_);
  }
}

void SnapshotEngine::drain() noexcept { device_->drain(); }

std::size_t SnapshotEngine::in_flight() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reap();
  return tickets_.size();
}

std::shared_ptr<Ticket> SnapshotEngine::enqueue(Direction direction, const CopyPlan& plan,
                                                const std::shared_ptr<Extent>& extent, std::size_t base,
                                                CallerStream caller, bool hold_caller) {
  if (base > extent->bytes() || plan.host_bytes() > extent->bytes() - base) {
    throw std::out_of_range("the plan takes " + std::to_string(plan.host_bytes()) + " bytes from byte " +
                            std::to_string(base) + " on of an extent of " + std::to_string(extent->bytes()));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  reap();
  const bool reads = direction == Direction::kDeviceToHost;
  EventPtr& own = reads ? last_read_ : last_write_;
  const EventPtr& other = reads ? last_write_ : last_read_;
  try {
    device_->order_after_caller(direction, caller);
    if (other != nullptr) {
      device_->order_after(direction, other);
    }
    device_->submit(direction, plan.ranges(), extent->data() + base);
    const EventPtr event = device_->record(direction);
    if (hold_caller) {
      device_->order_caller_after(caller, event);
    }
    auto ticket = std::make_shared<Ticket>(event, extent, plan.bytes());
    tickets_.push_back(ticket);
    own = event;
    return ticket;
  } catch (...) {
    device_->drain();  // copies that were enqueued before the failure still touch the extent
    throw;
  }
}

void SnapshotEngine::reap() {
  tickets_.erase(std::remove_if(tickets_.begin(), tickets_.end(),
                                [](const std::shared_ptr<Ticket>& ticket) { return ticket->done(); }),
                 tickets_.end());
  if (tickets_.empty()) {
    // Nothing is in flight, so there is nothing to wait for; a failed event must not fail later copies for ever.
    last_read_.reset();
    last_write_.reset();
  }
}

}  // namespace shardsnap
