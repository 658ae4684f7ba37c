#include "device/cuda_driver.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

namespace shardsnap {
namespace {

constexpr const char* kDefaultLibrary = "libcuda.so.1";
constexpr int kBatchVersion = cuda::kCopyBatch.version;
constexpr int kBatchWithFailIndexVersion = cuda::kCopyBatchWithFailIndex.version;

std::string last_loader_error() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

// NODELETE, because the driver's own threads and exit handlers outlive any handle to it.
void* open_library(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    throw DeviceUnavailableError("cannot load the CUDA driver " + path + ": " + last_loader_error() +
                                 ". Install the NVIDIA driver, or start the container with GPU access");
  }
  return handle;
}

std::string advice(cuda::Result result) {
  switch (result) {
    case cuda::kNoDevice:
      return "no CUDA device is visible: " + visible_devices_text() + "; nvidia-smi lists what the machine has";
    case cuda::kNotInitialized:
      return "a process forked from one that already used CUDA cannot use it: start workers with spawn";
    case cuda::kStubLibrary:
      return "this is the toolkit's stub: take its directory out of LD_LIBRARY_PATH";
    case cuda::kSystemNotReady:
      return "the machine's GPU services are still starting: check nvidia-fabricmanager";
    case cuda::kSystemDriverMismatch:
      return "the kernel module and libcuda are of different versions: reload the module or restart the machine";
    default:
      return "nvidia-smi shows whether the driver works at all; " + visible_devices_text();
  }
}

}  // namespace

std::string visible_devices_text() {
  const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
  if (value == nullptr) {
    return "CUDA_VISIBLE_DEVICES is not set";
  }
  return "CUDA_VISIBLE_DEVICES is \"" + std::string(value) + "\"";
}

DriverLibrary::DriverLibrary(const std::string& path) : path_(path), handle_(open_library(path), &dlclose) {
  void* symbol = dlsym(handle_.get(), cuda::kGetProcAddress.name);
  if (symbol == nullptr) {
    throw DeviceUnavailableError(path + " exports no " + cuda::kGetProcAddress.name + ": " + last_loader_error() +
                                 ". It is no CUDA driver, or one older than CUDA 12.0 (R525): update the driver");
  }
  get_proc_address_ = reinterpret_cast<decltype(get_proc_address_)>(symbol);
}

void* DriverLibrary::find(const char* name, int version) const {
  void* function = nullptr;
  int status = cuda::kProcAddressNotFound;
  // The legacy-stream variants, so that a caller's stream 0 means what it means to torch.
  const cuda::Result result = get_proc_address_(name, &function, version, cuda::kProcAddressLegacyStream, &status);
  return result == cuda::kSuccess && status == cuda::kProcAddressFound ? function : nullptr;
}

void* DriverLibrary::require(const char* name, int version) const {
  void* function = find(name, version);
  if (function == nullptr) {
    throw DeviceUnavailableError(path_ + " has no function " + name + " of version " + std::to_string(version) +
                                 ": update the NVIDIA driver");
  }
  return function;
}

CudaFunctions::CudaFunctions(const DriverLibrary& library)
    : init(library),
      driver_get_version(library),
      get_error_name(library),
      get_error_string(library),
      device_get(library),
      device_get_count(library),
      device_get_name(library),
      device_get_pci_bus_id(library),
      primary_context_retain(library),
      primary_context_release(library),
      context_push(library),
      context_pop(library),
      stream_create(library),
      stream_destroy(library),
      stream_wait_event(library),
      stream_synchronize(library),
      event_create(library),
      event_destroy(library),
      event_record(library),
      event_query(library),
      copy_host_to_device(library),
      copy_device_to_host(library),
      host_register(library),
      host_unregister(library) {}

CudaDriver::CudaDriver(const std::string& library)
    : library_(library.empty() ? kDefaultLibrary : library), functions_(library_), process_(getpid()) {
  initialise(library.empty() ? kDefaultLibrary : library);
  resolve_copy_batch();
}

std::shared_ptr<const CudaDriver> CudaDriver::open(const std::string& library) {
  // Before the lock: in a forked child another thread of the parent may hold it forever.
  static std::atomic<pid_t> first_process{0};
  pid_t expected = 0;
  if (!first_process.compare_exchange_strong(expected, getpid()) && expected != getpid()) {
    throw DeviceUnavailableError(forked_message());
  }
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const CudaDriver>> loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string path = library.empty() ? kDefaultLibrary : library;
  const auto found = loaded.find(path);
  if (found != loaded.end()) {
    return found->second;
  }
  auto driver = std::make_shared<const CudaDriver>(path);
  loaded.emplace(path, driver);
  return driver;
}

std::string CudaDriver::forked_message() {
  return "this process was forked from one that had loaded the CUDA driver, and CUDA does not work across fork: start "
         "workers with spawn";
}

std::string CudaDriver::version_text() const {
  return std::to_string(version_ / 1000) + "." + std::to_string(version_ % 1000 / 10);
}

std::string CudaDriver::error_text(cuda::Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (functions_.get_error_name(result, &name) != cuda::kSuccess || name == nullptr) {
    return "unknown CUresult " + std::to_string(result);
  }
  if (functions_.get_error_string(result, &text) != cuda::kSuccess || text == nullptr) {
    return name;
  }
  return std::string(name) + " (" + text + ")";
}

bool CudaDriver::usable() const noexcept { return getpid() == process_; }

cuda::Result CudaDriver::copy_batch(cuda::DevicePointer* to, cuda::DevicePointer* from, std::size_t* bytes,
                                    std::size_t count, cuda::Stream stream) const {
  cuda::MemcpyAttributes attributes;
  std::size_t first_copy = 0;
  if (copy_batch_ != nullptr) {
    return copy_batch_(to, from, bytes, count, &attributes, &first_copy, 1, stream);
  }
  if (copy_batch_with_fail_index_ != nullptr) {
    std::size_t fail_index = 0;
    return copy_batch_with_fail_index_(to, from, bytes, count, &attributes, &first_copy, 1, &fail_index, stream);
  }
  return cuda::kNotSupported;
}

void CudaDriver::initialise(const std::string& library) {
  const cuda::Result result = functions_.init(0U);
  if (result != cuda::kSuccess) {
    throw DeviceUnavailableError(std::string(functions_.init.name()) + " of " + library +
                                 " failed: " + error_text(result) + ": " + advice(result));
  }
  call<DeviceUnavailableError>(functions_.driver_get_version, &version_);
}

void CudaDriver::resolve_copy_batch() {
  // Asked for version 13000, a 12.8 driver may answer with its own, older signature: so only what it surely has.
  if (version_ >= kBatchVersion) {
    copy_batch_ =
        reinterpret_cast<decltype(copy_batch_)>(library_.find(cuda::kCopyBatch.name, cuda::kCopyBatch.version));
  } else if (version_ >= kBatchWithFailIndexVersion) {
    copy_batch_with_fail_index_ = reinterpret_cast<decltype(copy_batch_with_fail_index_)>(
        library_.find(cuda::kCopyBatchWithFailIndex.name, cuda::kCopyBatchWithFailIndex.version));
  }
}

}  // namespace shardsnap
