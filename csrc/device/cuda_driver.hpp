// The CUDA driver library, loaded at run time: typed entry points, and errors that name the call and the driver's code.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "device/cuda_abi.hpp"
#include "errors.hpp"

namespace shardsnap {

// An opened shared library with the driver's symbol lookup.
class DriverLibrary {
 public:
  explicit DriverLibrary(const std::string& path);

  // Null where the driver has no such function.
  [[nodiscard]] void* find(const char* name, int version) const;

  // Throws DeviceUnavailableError where the driver has no such function.
  [[nodiscard]] void* require(const char* name, int version) const;

 private:
  std::string path_;
  std::unique_ptr<void, int (*)(void*)> handle_;
  std::add_pointer_t<decltype(cuda::kGetProcAddress)::Signature> get_proc_address_ = nullptr;
};

// A resolved driver function that knows its own name.
template <const auto& Declaration>
class DriverFunction {
 public:
  using Pointer = std::add_pointer_t<typename std::decay_t<decltype(Declaration)>::Signature>;

  explicit DriverFunction(const DriverLibrary& library)
      : pointer_(reinterpret_cast<Pointer>(library.require(Declaration.name, Declaration.version))) {}

  template <typename... Arguments>
  cuda::Result operator()(Arguments... arguments) const {
    return pointer_(arguments...);
  }

  [[nodiscard]] static constexpr const char* name() { return Declaration.name; }

 private:
  Pointer pointer_;
};

struct CudaFunctions {
  explicit CudaFunctions(const DriverLibrary& library);

  DriverFunction<cuda::kInit> init;
  DriverFunction<cuda::kDriverGetVersion> driver_get_version;
  DriverFunction<cuda::kGetErrorName> get_error_name;
  DriverFunction<cuda::kGetErrorString> get_error_string;
  DriverFunction<cuda::kDeviceGet> device_get;
  DriverFunction<cuda::kDeviceGetCount> device_get_count;
  DriverFunction<cuda::kDeviceGetName> device_get_name;
  DriverFunction<cuda::kDeviceGetPciBusId> device_get_pci_bus_id;
  DriverFunction<cuda::kPrimaryContextRetain> primary_context_retain;
  DriverFunction<cuda::kPrimaryContextRelease> primary_context_release;
  DriverFunction<cuda::kContextPush> context_push;
  DriverFunction<cuda::kContextPop> context_pop;
  DriverFunction<cuda::kStreamCreate> stream_create;
  DriverFunction<cuda::kStreamDestroy> stream_destroy;
  DriverFunction<cuda::kStreamWaitEvent> stream_wait_event;
  DriverFunction<cuda::kStreamSynchronize> stream_synchronize;
  DriverFunction<cuda::kEventCreate> event_create;
  DriverFunction<cuda::kEventDestroy> event_destroy;
  DriverFunction<cuda::kEventRecord> event_record;
  DriverFunction<cuda::kEventQuery> event_query;
  DriverFunction<cuda::kCopyHostToDevice> copy_host_to_device;
  DriverFunction<cuda::kCopyDeviceToHost> copy_device_to_host;
  DriverFunction<cuda::kHostRegister> host_register;
  DriverFunction<cuda::kHostUnregister> host_unregister;
};

class CudaDriver {
 public:
  // Loads and initialises the library; an empty path means libcuda.so.1. Throws DeviceUnavailableError.
  explicit CudaDriver(const std::string& library);

  // The driver at `library`, loaded once per path and process. A failure is not remembered.
  [[nodiscard]] static std::shared_ptr<const CudaDriver> open(const std::string& library);

  // As the driver counts: 13000 for 13.0.
  [[nodiscard]] int version() const { return version_; }
  [[nodiscard]] std::string version_text() const;

  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
  [[nodiscard]] std::string error_text(cuda::Result result) const;

  // False in a child forked after the driver was loaded, where no driver call may be made.
  [[nodiscard]] bool usable() const noexcept;

  template <typename Error>
  void require_usable() const {
    if (!usable()) {
      throw Error(forked_message());
    }
  }

  [[nodiscard]] const CudaFunctions& functions() const { return functions_; }

  template <typename Error, typename Function, typename... Arguments>
  void call(const Function& function, Arguments... arguments) const {
    require_usable<Error>();
    const cuda::Result result = function(arguments...);
    if (result != cuda::kSuccess) {
      throw Error(std::string(function.name()) + " failed: " + error_text(result));
    }
  }

  // Whether copy_batch() may be called: drivers from 12.8 on.
  [[nodiscard]] bool has_copy_batch() const { return copy_batch_ != nullptr || copy_batch_with_fail_index_ != nullptr; }

  // cuMemcpyBatchAsync in the signature of this driver; sources are read in stream order.
  [[nodiscard]] cuda::Result copy_batch(cuda::DevicePointer* to, cuda::DevicePointer* from, std::size_t* bytes,
                                        std::size_t count, cuda::Stream stream) const;

 private:
  static std::string forked_message();
  void initialise(const std::string& library);
  void resolve_copy_batch();

  DriverLibrary library_;
  CudaFunctions functions_;
  pid_t process_;
  int version_ = 0;
  std::add_pointer_t<decltype(cuda::kCopyBatch)::Signature> copy_batch_ = nullptr;
  std::add_pointer_t<decltype(cuda::kCopyBatchWithFailIndex)::Signature> copy_batch_with_fail_index_ = nullptr;
};

// "CUDA_VISIBLE_DEVICES is "0,1"" or "CUDA_VISIBLE_DEVICES is not set", for messages.
std::string visible_devices_text();

}  // namespace shardsnap
