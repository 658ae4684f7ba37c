// Our declarations of the driver API against the toolkit's. Built only where the toolkit's headers are found.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <type_traits>

#include "device/cuda_abi.hpp"

namespace {

namespace cuda = shardsnap::cuda;

// Whether the calling convention passes the two alike: what a pointer points to is compared too, and an enum counts as
// an integer of its size. Structs match here and are compared field by field below.
template <typename Ours, typename Theirs>
constexpr bool same_type() {
  if constexpr (std::is_function_v<Ours> || std::is_function_v<Theirs>) {
    return std::is_same_v<Ours, Theirs>;
  } else if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>) {
    if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
      using OurPointee = std::remove_pointer_t<Ours>;
      using TheirPointee = std::remove_pointer_t<Theirs>;
      return std::is_const_v<OurPointee> == std::is_const_v<TheirPointee> &&
             same_type<std::remove_const_t<OurPointee>, std::remove_const_t<TheirPointee>>();
    } else {
      return false;
    }
  } else if constexpr (std::is_void_v<Ours> || std::is_void_v<Theirs>) {
    return std::is_void_v<Ours> && std::is_void_v<Theirs>;
  } else if constexpr (std::is_class_v<Ours> || std::is_class_v<Theirs>) {
    return std::is_class_v<Ours> && std::is_class_v<Theirs>;
  } else if constexpr (std::is_enum_v<Theirs>) {
    return std::is_integral_v<Ours> && sizeof(Ours) == sizeof(Theirs);
  } else {
    return std::is_integral_v<Ours> && std::is_integral_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
           std::is_signed_v<Ours> == std::is_signed_v<Theirs>;
  }
}

template <typename Ours, typename Theirs>
struct SameFunction {
  static constexpr bool equal() { return false; }
};

template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
struct SameFunction<OurResult(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool equal() {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
      return false;
    } else {
      return same_type<OurResult, TheirResult>() && (same_type<Ours, Theirs>() && ...);
    }
  }
};

template <const auto& Declaration, typename Theirs>
constexpr bool kSameFunction = SameFunction<typename std::decay_t<decltype(Declaration)>::Signature, Theirs>::equal();

// The version is in the name of the toolkit's type, so the two are checked together.
#define CHECK_FUNCTION(declaration, function, function_version)                         \
  static_assert(kSameFunction<cuda::declaration, PFN_##function##_v##function_version>, \
                #function " differs from the toolkit's");                               \
  static_assert(cuda::declaration.version == (function_version), #function " is asked for in another version")

CHECK_FUNCTION(kInit, cuInit, 2000);
CHECK_FUNCTION(kDriverGetVersion, cuDriverGetVersion, 2020);
CHECK_FUNCTION(kGetErrorName, cuGetErrorName, 6000);
CHECK_FUNCTION(kGetErrorString, cuGetErrorString, 6000);
CHECK_FUNCTION(kDeviceGet, cuDeviceGet, 2000);
CHECK_FUNCTION(kDeviceGetCount, cuDeviceGetCount, 2000);
CHECK_FUNCTION(kDeviceGetName, cuDeviceGetName, 2000);
CHECK_FUNCTION(kDeviceGetPciBusId, cuDeviceGetPCIBusId, 4010);
CHECK_FUNCTION(kPrimaryContextRetain, cuDevicePrimaryCtxRetain, 7000);
CHECK_FUNCTION(kPrimaryContextRelease, cuDevicePrimaryCtxRelease, 11000);
CHECK_FUNCTION(kContextPush, cuCtxPushCurrent, 4000);
CHECK_FUNCTION(kContextPop, cuCtxPopCurrent, 4000);
CHECK_FUNCTION(kStreamCreate, cuStreamCreate, 2000);
CHECK_FUNCTION(kStreamDestroy, cuStreamDestroy, 4000);
CHECK_FUNCTION(kStreamWaitEvent, cuStreamWaitEvent, 3020);
CHECK_FUNCTION(kStreamSynchronize, cuStreamSynchronize, 2000);
CHECK_FUNCTION(kEventCreate, cuEventCreate, 2000);
CHECK_FUNCTION(kEventDestroy, cuEventDestroy, 4000);
CHECK_FUNCTION(kEventRecord, cuEventRecord, 2000);
CHECK_FUNCTION(kEventQuery, cuEventQuery, 2000);
CHECK_FUNCTION(kCopyHostToDevice, cuMemcpyHtoDAsync, 3020);
CHECK_FUNCTION(kCopyDeviceToHost, cuMemcpyDtoHAsync, 3020);
CHECK_FUNCTION(kHostRegister, cuMemHostRegister, 6050);
CHECK_FUNCTION(kHostUnregister, cuMemHostUnregister, 4000);
CHECK_FUNCTION(kLaunchHostFunction, cuLaunchHostFunc, 10000);
CHECK_FUNCTION(kGetProcAddress, cuGetProcAddress, 12000);

#if CUDA_VERSION >= 12080
CHECK_FUNCTION(kCopyBatchWithFailIndex, cuMemcpyBatchAsync, 12080);

static_assert(sizeof(cuda::MemcpyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(alignof(cuda::MemcpyAttributes) == alignof(CUmemcpyAttributes));
static_assert(offsetof(cuda::MemcpyAttributes, source_access_order) == offsetof(CUmemcpyAttributes, srcAccessOrder));
static_assert(offsetof(cuda::MemcpyAttributes, source_location_hint) == offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(cuda::MemcpyAttributes, destination_location_hint) == offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(cuda::MemcpyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(sizeof(cuda::MemoryLocation) == sizeof(CUmemLocation));
static_assert(offsetof(cuda::MemoryLocation, id) == offsetof(CUmemLocation, id));
static_assert(cuda::kSourceAccessOrderStream == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(cuda::kSourceAccessOrderAny == CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
static_assert(CU_MEMCPY_FLAG_DEFAULT == 0);
#endif

#if CUDA_VERSION >= 13000
CHECK_FUNCTION(kCopyBatch, cuMemcpyBatchAsync, 13000);
// The check can fail at all: the two signatures of one name are not taken for each other.
static_assert(!kSameFunction<cuda::kCopyBatch, PFN_cuMemcpyBatchAsync_v12080>);
static_assert(!kSameFunction<cuda::kCopyHostToDevice, PFN_cuMemcpyDtoHAsync_v3020>);
#endif

static_assert(std::is_same_v<cuda::DevicePointer, CUdeviceptr>);
static_assert(std::is_same_v<cuda::Device, CUdevice>);
static_assert(std::is_same_v<cuda::HostFunction, CUhostFn>);
static_assert(sizeof(cuda::Result) == sizeof(CUresult));

static_assert(cuda::kSuccess == CUDA_SUCCESS);
static_assert(cuda::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(cuda::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cuda::kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(cuda::kStubLibrary == CUDA_ERROR_STUB_LIBRARY);
static_assert(cuda::kDeviceUnavailable == CUDA_ERROR_DEVICE_UNAVAILABLE);
static_assert(cuda::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(cuda::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(cuda::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(cuda::kOperatingSystem == CUDA_ERROR_OPERATING_SYSTEM);
static_assert(cuda::kInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda::kIllegalAddress == CUDA_ERROR_ILLEGAL_ADDRESS);
static_assert(cuda::kHostMemoryAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(cuda::kHostMemoryNotRegistered == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
static_assert(cuda::kLaunchFailed == CUDA_ERROR_LAUNCH_FAILED);
static_assert(cuda::kNotPermitted == CUDA_ERROR_NOT_PERMITTED);
static_assert(cuda::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(cuda::kSystemNotReady == CUDA_ERROR_SYSTEM_NOT_READY);
static_assert(cuda::kSystemDriverMismatch == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
static_assert(cuda::kUnknown == CUDA_ERROR_UNKNOWN);

static_assert(cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(cuda::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cuda::kProcAddressLegacyStream == CU_GET_PROC_ADDRESS_LEGACY_STREAM);
static_assert(cuda::kProcAddressFound == CU_GET_PROC_ADDRESS_SUCCESS);
static_assert(cuda::kProcAddressNotFound == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
static_assert(cuda::kProcAddressVersionNotSufficient == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);

}  // namespace

TEST_CASE("the declarations were held against a toolkit that has all of them") {
  WARN(CUDA_VERSION >= cuda::kCopyBatch.version);
  CHECK(reinterpret_cast<std::uintptr_t>(CU_STREAM_LEGACY) == cuda::kLegacyStreamHandle);
}
