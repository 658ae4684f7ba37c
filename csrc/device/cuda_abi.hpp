// The part of the CUDA driver API that shardsnap calls, declared here so that no CUDA toolkit is needed to build.
// tests/cpp/test_cuda_abi.cpp holds it against the toolkit's headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardsnap::cuda {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextHandle*;
using Stream = struct StreamHandle*;
using StreamEvent = struct EventHandle*;
using HostFunction = void (*)(void* user_data);

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kStubLibrary = 34;
inline constexpr Result kDeviceUnavailable = 46;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kOperatingSystem = 304;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kHostMemoryAlreadyRegistered = 712;
inline constexpr Result kHostMemoryNotRegistered = 713;
inline constexpr Result kLaunchFailed = 719;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kSystemNotReady = 802;
inline constexpr Result kSystemDriverMismatch = 803;
inline constexpr Result kUnknown = 999;

inline constexpr unsigned int kStreamNonBlocking = 1;
inline constexpr unsigned int kEventDisableTiming = 2;
inline constexpr unsigned int kHostRegisterPortable = 1;
inline constexpr std::uint64_t kProcAddressLegacyStream = 1;
inline constexpr int kProcAddressFound = 0;
inline constexpr int kProcAddressNotFound = 1;
inline constexpr int kProcAddressVersionNotSufficient = 2;
inline constexpr std::uintptr_t kLegacyStreamHandle = 1;

inline constexpr int kSourceAccessOrderStream = 1;
inline constexpr int kSourceAccessOrderAny = 3;

struct MemoryLocation {
  int type = 0;
  int id = 0;
};

// CUmemcpyAttributes: what holds for each copy of a batch.
struct MemcpyAttributes {
  int source_access_order = kSourceAccessOrderStream;
  MemoryLocation source_location_hint;
  MemoryLocation destination_location_hint;
  unsigned int flags = 0;
};

// One driver function: the name and the version that make cuGetProcAddress answer with this signature.
template <typename FunctionSignature>
struct Function {
  using Signature = FunctionSignature;
  const char* name;
  int version;
};

inline constexpr Function<Result(unsigned int flags)> kInit{"cuInit", 2000};
inline constexpr Function<Result(int* version)> kDriverGetVersion{"cuDriverGetVersion", 2020};
inline constexpr Function<Result(Result error, const char** text)> kGetErrorName{"cuGetErrorName", 6000};
inline constexpr Function<Result(Result error, const char** text)> kGetErrorString{"cuGetErrorString", 6000};

inline constexpr Function<Result(Device* device, int ordinal)> kDeviceGet{"cuDeviceGet", 2000};
inline constexpr Function<Result(int* count)> kDeviceGetCount{"cuDeviceGetCount", 2000};
inline constexpr Function<Result(char* name, int length, Device device)> kDeviceGetName{"cuDeviceGetName", 2000};
inline constexpr Function<Result(char* bus_id, int length, Device device)> kDeviceGetPciBusId{"cuDeviceGetPCIBusId",
                                                                                              4010};

inline constexpr Function<Result(Context* context, Device device)> kPrimaryContextRetain{"cuDevicePrimaryCtxRetain",
                                                                                         7000};
inline constexpr Function<Result(Device device)> kPrimaryContextRelease{"cuDevicePrimaryCtxRelease", 11000};
inline constexpr Function<Result(Context context)> kContextPush{"cuCtxPushCurrent", 4000};
inline constexpr Function<Result(Context* context)> kContextPop{"cuCtxPopCurrent", 4000};

inline constexpr Function<Result(Stream* stream, unsigned int flags)> kStreamCreate{"cuStreamCreate", 2000};
inline constexpr Function<Result(Stream stream)> kStreamDestroy{"cuStreamDestroy", 4000};
inline constexpr Function<Result(Stream stream, StreamEvent event, unsigned int flags)> kStreamWaitEvent{
    "cuStreamWaitEvent", 3020};
inline constexpr Function<Result(Stream stream)> kStreamSynchronize{"cuStreamSynchronize", 2000};

inline constexpr Function<Result(StreamEvent* event, unsigned int flags)> kEventCreate{"cuEventCreate", 2000};
inline constexpr Function<Result(StreamEvent event)> kEventDestroy{"cuEventDestroy", 4000};
inline constexpr Function<Result(StreamEvent event, Stream stream)> kEventRecord{"cuEventRecord", 2000};
inline constexpr Function<Result(StreamEvent event)> kEventQuery{"cuEventQuery", 2000};

inline constexpr Function<Result(DevicePointer to, const void* from, std::size_t bytes, Stream stream)>
    kCopyHostToDevice{"cuMemcpyHtoDAsync", 3020};
inline constexpr Function<Result(void* to, DevicePointer from, std::size_t bytes, Stream stream)> kCopyDeviceToHost{
    "cuMemcpyDtoHAsync", 3020};

// CUDA 13.0 dropped fail_index: one name, two signatures, told apart by version alone.
inline constexpr Function<Result(DevicePointer* to, DevicePointer* from, std::size_t* bytes, std::size_t count,
                                 MemcpyAttributes* attributes, std::size_t* attribute_starts,
                                 std::size_t attribute_count, std::size_t* fail_index, Stream stream)>
    kCopyBatchWithFailIndex{"cuMemcpyBatchAsync", 12080};
inline constexpr Function<Result(DevicePointer* to, DevicePointer* from, std::size_t* bytes, std::size_t count,
                                 MemcpyAttributes* attributes, std::size_t* attribute_starts,
                                 std::size_t attribute_count, Stream stream)>
    kCopyBatch{"cuMemcpyBatchAsync", 13000};

inline constexpr Function<Result(void* address, std::size_t bytes, unsigned int flags)> kHostRegister{
    "cuMemHostRegister", 6050};
inline constexpr Function<Result(void* address)> kHostUnregister{"cuMemHostUnregister", 4000};

// The tests alone call this one, to hold a stream until they say so.
inline constexpr Function<Result(Stream stream, HostFunction function, void* user_data)> kLaunchHostFunction{
    "cuLaunchHostFunc", 10000};

// The one symbol that is looked up by its exported name; there since CUDA 12.0.
inline constexpr Function<Result(const char* symbol, void** function, int version, std::uint64_t flags, int* status)>
    kGetProcAddress{"cuGetProcAddress_v2", 12000};

}  // namespace shardsnap::cuda
