#include "emulator/settings.hpp"

#include <cstdlib>

namespace shardsnap::emulator {
namespace {

int number_from_environment(const char* name, int fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') {
    return fallback;
  }
  return static_cast<int>(std::strtol(text, nullptr, 10));
}

}  // namespace

Settings Settings::from_environment() {
  const Settings defaults;
  Settings settings;
  settings.driver_version = number_from_environment("SHARDSNAP_EMULATOR_DRIVER_VERSION", defaults.driver_version);
  settings.init_result = number_from_environment("SHARDSNAP_EMULATOR_INIT_RESULT", defaults.init_result);
  settings.devices = number_from_environment("SHARDSNAP_EMULATOR_DEVICES", defaults.devices);
  settings.register_result = number_from_environment("SHARDSNAP_EMULATOR_REGISTER_RESULT", defaults.register_result);
  return settings;
}

}  // namespace shardsnap::emulator
