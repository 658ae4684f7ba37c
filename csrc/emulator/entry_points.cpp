// The functions of the driver API, and cuGetProcAddress, which hands them out by name and version.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <new>
#include <string_view>
#include <system_error>
#include <type_traits>

#include "emulator/contexts.hpp"

namespace shardsnap::emulator {
namespace {

// No address of a real buffer is as low as this.
constexpr std::uintptr_t kLowestAddress = 4096;

struct ErrorDescription {
  cuda::Result result;
  const char* name;
  const char* text;
};

constexpr std::array kErrors{
    ErrorDescription{cuda::kSuccess, "CUDA_SUCCESS", "no error"},
    ErrorDescription{cuda::kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    ErrorDescription{cuda::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    ErrorDescription{cuda::kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    ErrorDescription{cuda::kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    ErrorDescription{cuda::kStubLibrary, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    ErrorDescription{cuda::kDeviceUnavailable, "CUDA_ERROR_DEVICE_UNAVAILABLE",
                     "CUDA-capable device(s) is/are busy or unavailable"},
    ErrorDescription{cuda::kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    ErrorDescription{cuda::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    ErrorDescription{cuda::kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    ErrorDescription{cuda::kOperatingSystem, "CUDA_ERROR_OPERATING_SYSTEM",
                     "OS call failed or operation not supported on this OS"},
    ErrorDescription{cuda::kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    ErrorDescription{cuda::kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    ErrorDescription{cuda::kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    ErrorDescription{cuda::kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
                     "part or all of the requested memory range is already mapped"},
    ErrorDescription{cuda::kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
                     "pointer does not correspond to a registered memory region"},
    ErrorDescription{cuda::kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    ErrorDescription{cuda::kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    ErrorDescription{cuda::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    ErrorDescription{cuda::kSystemNotReady, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    ErrorDescription{cuda::kSystemDriverMismatch, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
                     "system has unsupported display driver / cuda driver combination"},
    ErrorDescription{cuda::kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

Driver& driver() { return Driver::instance(); }

// Runs a function's body where no exception may pass: the callers know only results.
template <typename Body>
cuda::Result answer(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return cuda::kOutOfMemory;
  } catch (const std::system_error&) {
    return cuda::kOperatingSystem;
  }
}

// For functions that need the driver to be initialised.
template <typename Body>
cuda::Result when_ready(Body body) {
  const cuda::Result readiness = driver().readiness();
  return readiness == cuda::kSuccess ? answer(body) : readiness;
}

// For functions that need a current context, too.
template <typename Body>
cuda::Result in_context(Body body) {
  return when_ready([&body]() -> cuda::Result {
    const auto current = driver().current();
    return current.second == nullptr ? cuda::kInvalidContext : body(*current.second, current.first);
  });
}

// For functions that work on a stream, too.
template <typename Body>
cuda::Result on_stream(cuda::Stream handle, Body body) {
  return in_context([handle, &body](const Context& context, cuda::Context) -> cuda::Result {
    const auto stream = context.find_stream(handle);
    return stream == nullptr ? cuda::kInvalidHandle : body(*stream, context);
  });
}

bool device_exists(cuda::Device device) { return device >= 0 && device < driver().settings().devices; }

bool valid_address(std::uintptr_t address) { return address >= kLowestAddress; }

void enqueue_copy(Stream& stream, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
  stream.enqueue(
      [to, from, bytes] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
}

cuda::Result copy(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, cuda::Stream handle) {
  return on_stream(handle, [to, from, bytes](Stream& stream, const Context&) {
    if (bytes > 0 && (!valid_address(to) || !valid_address(from))) {
      return cuda::kInvalidValue;
    }
    enqueue_copy(stream, to, from, bytes);
    ++driver().copies.single_copies;
    return cuda::kSuccess;
  });
}

bool valid_attributes(const cuda::MemcpyAttributes* attributes, const std::size_t* starts, std::size_t attribute_count,
                      std::size_t copy_count) {
  if (attributes == nullptr || starts == nullptr || attribute_count == 0 || attribute_count > copy_count) {
    return false;
  }
  for (std::size_t index = 0; index < attribute_count; ++index) {
    const bool starts_well = index == 0 ? starts[0] == 0 : starts[index] > starts[index - 1];
    const int order = attributes[index].source_access_order;
    if (!starts_well || starts[index] >= copy_count || order < cuda::kSourceAccessOrderStream ||
        order > cuda::kSourceAccessOrderAny) {
      return false;
    }
  }
  return true;
}

// All or nothing: a batch with a bad copy enqueues none.
cuda::Result copy_batch_reporting(cuda::DevicePointer* to, cuda::DevicePointer* from, std::size_t* bytes,
                                  std::size_t count, cuda::MemcpyAttributes* attributes, std::size_t* starts,
                                  std::size_t attribute_count, std::size_t* fail_index, cuda::Stream handle) {
  *fail_index = static_cast<std::size_t>(-1);
  return on_stream(handle, [=](Stream& stream, const Context&) {
    const bool arrays_given = to != nullptr && from != nullptr && bytes != nullptr && count > 0;
    if (!arrays_given || Context::is_legacy(handle) || !valid_attributes(attributes, starts, attribute_count, count)) {
      return cuda::kInvalidValue;
    }
    for (std::size_t index = 0; index < count; ++index) {
      if (bytes[index] == 0 || !valid_address(to[index]) || !valid_address(from[index])) {
        *fail_index = index;
        return cuda::kInvalidValue;
      }
    }
    for (std::size_t index = 0; index < count; ++index) {
      enqueue_copy(stream, to[index], from[index], bytes[index]);
    }
    ++driver().copies.batch_calls;
    driver().copies.batch_copies += count;
    return cuda::kSuccess;
  });
}

const ErrorDescription* find_error(cuda::Result result) {
  const auto* const found = std::find_if(kErrors.begin(), kErrors.end(),
                                         [result](const ErrorDescription& error) { return error.result == result; });
  return found == kErrors.end() ? nullptr : found;
}

// The functions below are the driver's, in the order of cuda_abi.hpp.

cuda::Result init(unsigned int flags) {
  return flags == 0 ? answer([] { return driver().initialise(); }) : cuda::kInvalidValue;
}

cuda::Result driver_get_version(int* version) {
  *version = driver().settings().driver_version;
  return cuda::kSuccess;
}

cuda::Result get_error_name(cuda::Result result, const char** text) {
  const ErrorDescription* error = find_error(result);
  *text = error == nullptr ? nullptr : error->name;
  return error == nullptr ? cuda::kInvalidValue : cuda::kSuccess;
}

cuda::Result get_error_string(cuda::Result result, const char** text) {
  const ErrorDescription* error = find_error(result);
  *text = error == nullptr ? nullptr : error->text;
  return error == nullptr ? cuda::kInvalidValue : cuda::kSuccess;
}

cuda::Result device_get(cuda::Device* device, int ordinal) {
  return when_ready([=] {
    *device = ordinal;
    return device_exists(ordinal) ? cuda::kSuccess : cuda::kInvalidDevice;
  });
}

cuda::Result device_get_count(int* count) {
  return when_ready([=] {
    *count = driver().settings().devices;
    return cuda::kSuccess;
  });
}

cuda::Result device_get_name(char* name, int length, cuda::Device device) {
  return when_ready([=] {
    std::snprintf(name, static_cast<std::size_t>(length), "Emulated CUDA device");
    return device_exists(device) ? cuda::kSuccess : cuda::kInvalidDevice;
  });
}

cuda::Result device_get_pci_bus_id(char* bus_id, int length, cuda::Device device) {
  return when_ready([=] {
    std::snprintf(bus_id, static_cast<std::size_t>(length), "FFFF:%02X:00.0", static_cast<unsigned int>(device));
    return device_exists(device) ? cuda::kSuccess : cuda::kInvalidDevice;
  });
}

cuda::Result primary_context_retain(cuda::Context* context, cuda::Device device) {
  return when_ready([=] { return driver().retain(device, context); });
}

cuda::Result primary_context_release(cuda::Device device) {
  return when_ready([=] { return driver().release(device); });
}

cuda::Result context_push(cuda::Context context) {
  return when_ready([=] { return driver().push(context); });
}

cuda::Result context_pop(cuda::Context* context) {
  return when_ready([=] { return driver().pop(context); });
}

cuda::Result stream_create(cuda::Stream* stream, unsigned int flags) {
  return in_context([=](Context& context, cuda::Context) {
    if (flags != cuda::kStreamNonBlocking) {
      return cuda::kNotSupported;  // a blocking stream synchronises with the legacy one, which is not emulated
    }
    *stream = context.streams.add(std::make_shared<Stream>());
    return cuda::kSuccess;
  });
}

cuda::Result stream_destroy(cuda::Stream stream) {
  return in_context([=](Context& context, cuda::Context) {
    return context.streams.remove(stream) ? cuda::kSuccess : cuda::kInvalidHandle;
  });
}

cuda::Result stream_wait_event(cuda::Stream handle, cuda::StreamEvent event_handle, unsigned int flags) {
  return on_stream(handle, [=](Stream& stream, const Context& context) {
    const auto event = context.events.find(event_handle);
    if (event == nullptr) {
      return cuda::kInvalidHandle;
    }
    if (flags != 0) {
      return cuda::kInvalidValue;
    }
    if (const auto completion = event->latest()) {
      stream.enqueue([completion] { completion->wait(); });
    }
    return cuda::kSuccess;
  });
}

cuda::Result stream_synchronize(cuda::Stream handle) {
  return on_stream(handle, [](Stream& stream, const Context&) {
    stream.synchronize();
    return cuda::kSuccess;
  });
}

cuda::Result event_create(cuda::StreamEvent* event, unsigned int flags) {
  return in_context([=](Context& context, cuda::Context) {
    if (flags != cuda::kEventDisableTiming) {
      return cuda::kNotSupported;  // no clock is emulated
    }
    *event = context.events.add(std::make_shared<StreamEvent>());
    return cuda::kSuccess;
  });
}

cuda::Result event_destroy(cuda::StreamEvent event) {
  return in_context([=](Context& context, cuda::Context) {
    return context.events.remove(event) ? cuda::kSuccess : cuda::kInvalidHandle;
  });
}

cuda::Result event_record(cuda::StreamEvent event_handle, cuda::Stream handle) {
  return on_stream(handle, [=](Stream& stream, const Context& context) {
    const auto event = context.events.find(event_handle);
    if (event == nullptr) {
      return cuda::kInvalidHandle;
    }
    event->record(stream);
    return cuda::kSuccess;
  });
}

cuda::Result event_query(cuda::StreamEvent event_handle) {
  return in_context([=](const Context& context, cuda::Context) {
    const auto event = context.events.find(event_handle);
    if (event == nullptr) {
      return cuda::kInvalidHandle;
    }
    const auto completion = event->latest();
    return completion == nullptr || completion->finished() ? cuda::kSuccess : cuda::kNotReady;
  });
}

cuda::Result copy_host_to_device(cuda::DevicePointer to, const void* from, std::size_t bytes, cuda::Stream stream) {
  return copy(to, reinterpret_cast<std::uintptr_t>(from), bytes, stream);
}

cuda::Result copy_device_to_host(void* to, cuda::DevicePointer from, std::size_t bytes, cuda::Stream stream) {
  return copy(reinterpret_cast<std::uintptr_t>(to), from, bytes, stream);
}

cuda::Result copy_batch_with_fail_index(cuda::DevicePointer* to, cuda::DevicePointer* from, std::size_t* bytes,
                                        std::size_t count, cuda::MemcpyAttributes* attributes, std::size_t* starts,
                                        std::size_t attribute_count, std::size_t* fail_index, cuda::Stream stream) {
  return copy_batch_reporting(to, from, bytes, count, attributes, starts, attribute_count, fail_index, stream);
}

cuda::Result copy_batch(cuda::DevicePointer* to, cuda::DevicePointer* from, std::size_t* bytes, std::size_t count,
                        cuda::MemcpyAttributes* attributes, std::size_t* starts, std::size_t attribute_count,
                        cuda::Stream stream) {
  std::size_t fail_index = 0;
  return copy_batch_reporting(to, from, bytes, count, attributes, starts, attribute_count, &fail_index, stream);
}

cuda::Result host_register(void* address, std::size_t bytes, unsigned int flags) {
  return in_context([=](const Context&, cuda::Context handle) {
    if (!valid_address(reinterpret_cast<std::uintptr_t>(address)) || bytes == 0 || flags > 15U) {
      return cuda::kInvalidValue;
    }
    const cuda::Result ordered = driver().settings().register_result;
    return ordered == cuda::kSuccess ? driver().registrations.add(handle, address, bytes) : ordered;
  });
}

cuda::Result host_unregister(void* address) {
  return in_context([=](const Context&, cuda::Context) { return driver().registrations.remove(address); });
}

cuda::Result launch_host_function(cuda::Stream handle, cuda::HostFunction function, void* user_data) {
  return on_stream(handle, [=](Stream& stream, const Context&) {
    stream.enqueue([=] { function(user_data); });
    return cuda::kSuccess;
  });
}

struct EntryPoint {
  std::string_view name;
  int version;
  void* address;
};

// Compiles only where the function has the signature that cuda_abi.hpp declares.
template <typename Signature>
EntryPoint entry(const cuda::Function<Signature>& declaration, std::decay_t<Signature> function) {
  return {declaration.name, declaration.version, reinterpret_cast<void*>(function)};
}

const auto& entry_points() {
  static const std::array table{
      entry(cuda::kInit, init),
      entry(cuda::kDriverGetVersion, driver_get_version),
      entry(cuda::kGetErrorName, get_error_name),
      entry(cuda::kGetErrorString, get_error_string),
      entry(cuda::kDeviceGet, device_get),
      entry(cuda::kDeviceGetCount, device_get_count),
      entry(cuda::kDeviceGetName, device_get_name),
      entry(cuda::kDeviceGetPciBusId, device_get_pci_bus_id),
      entry(cuda::kPrimaryContextRetain, primary_context_retain),
      entry(cuda::kPrimaryContextRelease, primary_context_release),
      entry(cuda::kContextPush, context_push),
      entry(cuda::kContextPop, context_pop),
      entry(cuda::kStreamCreate, stream_create),
      entry(cuda::kStreamDestroy, stream_destroy),
      entry(cuda::kStreamWaitEvent, stream_wait_event),
      entry(cuda::kStreamSynchronize, stream_synchronize),
      entry(cuda::kEventCreate, event_create),
      entry(cuda::kEventDestroy, event_destroy),
      entry(cuda::kEventRecord, event_record),
      entry(cuda::kEventQuery, event_query),
      entry(cuda::kCopyHostToDevice, copy_host_to_device),
      entry(cuda::kCopyDeviceToHost, copy_device_to_host),
      entry(cuda::kCopyBatchWithFailIndex, copy_batch_with_fail_index),
      entry(cuda::kCopyBatch, copy_batch),
      entry(cuda::kHostRegister, host_register),
      entry(cuda::kHostUnregister, host_unregister),
      entry(cuda::kLaunchHostFunction, launch_host_function),
  };
  return table;
}

// The newest entry of that name which both the caller's version and this driver's include.
cuda::Result get_proc_address(const char* symbol, void** function, int version, int* status) {
  *function = nullptr;
  *status = cuda::kProcAddressNotFound;
  const int driver_version = driver().settings().driver_version;
  if (version > driver_version) {
    return cuda::kInvalidValue;
  }
  int newest = 0;
  for (const EntryPoint& point : entry_points()) {
    if (point.name != symbol || point.version > driver_version) {
      continue;
    }
    if (point.version > version) {
      *status = *function == nullptr ? cuda::kProcAddressVersionNotSufficient : *status;
    } else if (point.version > newest) {
      newest = point.version;
      *function = point.address;
      *status = cuda::kProcAddressFound;
    }
  }
  return cuda::kSuccess;
}

}  // namespace
}  // namespace shardsnap::emulator

extern "C" {

// NOLINTNEXTLINE(readability-identifier-naming): the name is the driver's
__attribute__((visibility("default"))) shardsnap::cuda::Result cuGetProcAddress_v2(const char* symbol, void** function,
                                                                                   int version, std::uint64_t /*flags*/,
                                                                                   int* status) {
  int ignored = 0;
  return shardsnap::emulator::get_proc_address(symbol, function, version, status == nullptr ? &ignored : status);
}

__attribute__((visibility("default"))) void shardsnap_emulator_counts(shardsnap::emulator::Counts* counts) {
  *counts = shardsnap::emulator::Driver::instance().counts();
}

}  // extern "C"
