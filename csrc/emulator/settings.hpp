// What the environment asks of the emulated driver. Read when the library is first used and again at each cuInit.
#pragma once

#include "device/cuda_abi.hpp"

namespace shardsnap::emulator {

struct Settings {
  int driver_version = 13000;                     // SHARDSNAP_EMULATOR_DRIVER_VERSION
  cuda::Result init_result = cuda::kSuccess;      // SHARDSNAP_EMULATOR_INIT_RESULT
  int devices = 1;                                // SHARDSNAP_EMULATOR_DEVICES
  cuda::Result register_result = cuda::kSuccess;  // SHARDSNAP_EMULATOR_REGISTER_RESULT

  static Settings from_environment();
};

}  // namespace shardsnap::emulator
