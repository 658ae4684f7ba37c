// A CPU-only machine as a copy device: worker threads are the streams, and every copy is split over them.
#pragma once

#include <memory>

#include "device/copy_device.hpp"

namespace shardsnap {

// threads: worker threads, at least 1; 0 means one per usable core, at most 16.
std::shared_ptr<CopyDevice> make_cpu_device(unsigned threads);

}  // namespace shardsnap
