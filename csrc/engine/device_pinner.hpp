// Lets the arena pin its slabs for a copy device.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "device/copy_device.hpp"
#include "memory/host_pinner.hpp"

namespace shardsnap {

class DevicePinner final : public HostPinner {
 public:
  explicit DevicePinner(std::shared_ptr<CopyDevice> device) : device_(std::move(device)) {}

  void pin(void* address, std::size_t bytes) override { device_->register_host(address, bytes); }
  void unpin(void* address) noexcept override { device_->unregister_host(address); }

 private:
  std::shared_ptr<CopyDevice> device_;
};

}  // namespace shardsnap
