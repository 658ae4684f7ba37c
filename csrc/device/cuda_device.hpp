// A CUDA device through the driver API, loaded at run time: no CUDA toolkit is needed to build or to run.
#pragma once

#include <memory>
#include <string>

#include "device/copy_device.hpp"

namespace shardsnap {

// Opens CUDA device `ordinal` (as the driver numbers it, after CUDA_VISIBLE_DEVICES) through the driver library at
// `library`, or libcuda.so.1 where it is empty. Retains the device's primary context, the one that torch uses, until
// destroyed. Throws DeviceUnavailableError that says what is missing.
std::shared_ptr<CopyDevice> make_cuda_device(int ordinal, const std::string& library);

// NUMA node of the PCI device `bus_id` according to the sysfs tree at `sysfs_root` ("/sys"), or -1 where it is unknown
// or the machine has only one.
int pci_numa_node(const std::string& bus_id, const std::string& sysfs_root);

}  // namespace shardsnap
