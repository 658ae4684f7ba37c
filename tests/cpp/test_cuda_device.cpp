// The CUDA device against the emulated driver. CTest runs this once per driver version.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda_device.hpp"
#include "device/cuda_driver.hpp"
#include "emulator/counts.hpp"
#include "errors.hpp"

namespace {

using namespace std::chrono_literals;
using shardsnap::CopyDevice;
using shardsnap::CopyError;
using shardsnap::CopyRange;
using shardsnap::CopyRanges;
using shardsnap::CudaDriver;
using shardsnap::DeviceUnavailableError;
using shardsnap::Direction;
using shardsnap::DriverFunction;
using shardsnap::DriverLibrary;
using shardsnap::EventPtr;
using shardsnap::PinningError;
using shardsnap::emulator::Counts;
namespace cuda = shardsnap::cuda;

using Bytes = std::vector<std::byte>;

const std::string kEmulator = SHARDSNAP_EMULATOR_PATH;
constexpr auto kLongWait = 20s;
// Long enough for work that is wrongly not held back to show up.
constexpr auto kShortWait = 20ms;

int driver_version() {
  const char* text = std::getenv("SHARDSNAP_EMULATOR_DRIVER_VERSION");
  return text == nullptr ? 13000 : std::atoi(text);
}

bool batch_expected() { return driver_version() >= 12080; }

// Another spelling of the emulator's path each time, so that the driver is initialised anew rather than found loaded.
std::string fresh_emulator_path() {
  static int times = 0;
  ++times;
  std::string path = kEmulator;
  for (int time = 0; time < times; ++time) {
    path.insert(path.rfind('/') + 1, "./");
  }
  return path;
}

Counts emulator_counts() {
  void* library = dlopen(kEmulator.c_str(), RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library != nullptr);
  const auto function =
      reinterpret_cast<shardsnap::emulator::CountsFunction>(dlsym(library, shardsnap::emulator::kCountsSymbol));
  REQUIRE(static_cast<bool>(function));
  Counts counts{};
  function(&counts);
  dlclose(library);
  return counts;
}

void check_nothing_new_lives(const Counts& before) {
  const Counts now = emulator_counts();
  CHECK(now.context_references == before.context_references);
  CHECK(now.streams == before.streams);
  CHECK(now.events == before.events);
  CHECK(now.registrations == before.registrations);
  CHECK(now.orphans == before.orphans);
}

// Sets a variable for the emulated driver, which reads it at cuInit.
class EmulatorVariable {
 public:
  EmulatorVariable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~EmulatorVariable() {
    unsetenv(name_);
    const CudaDriver reread(kEmulator);
  }
  EmulatorVariable(const EmulatorVariable&) = delete;
  EmulatorVariable& operator=(const EmulatorVariable&) = delete;

 private:
  const char* name_;
};

template <typename Error, typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  FAIL("nothing of the expected type was thrown");
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) {
    MESSAGE("not in \"" << text << "\": " << part);
  }
  return found;
}

Bytes random_bytes(std::size_t count, unsigned int seed) {
  std::mt19937_64 engine(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(engine());
  }
  return bytes;
}

std::uintptr_t address_of(const Bytes& bytes) { return reinterpret_cast<std::uintptr_t>(bytes.data()); }

CopyRanges ranges_of(std::vector<CopyRange> ranges) {
  return std::make_shared<const std::vector<CopyRange>>(std::move(ranges));
}

CopyRanges whole(const Bytes& device) { return ranges_of({{address_of(device), 0, device.size()}}); }

// A stream of the caller's, and what a caller does with it, in the primary context as torch would.
class Caller {
 public:
  Caller() : driver_(CudaDriver::open(kEmulator)), launch_(DriverLibrary(kEmulator)) {
    cuda::Context context = nullptr;
    CHECK(functions().primary_context_retain(&context, 0) == cuda::kSuccess);
    CHECK(functions().context_push(context) == cuda::kSuccess);
    CHECK(functions().stream_create(&stream_, cuda::kStreamNonBlocking) == cuda::kSuccess);
  }
  ~Caller() {
    open();
    CHECK(functions().stream_synchronize(stream_) == cuda::kSuccess);
    CHECK(functions().stream_destroy(stream_) == cuda::kSuccess);
    cuda::Context context = nullptr;
    CHECK(functions().context_pop(&context) == cuda::kSuccess);
    CHECK(functions().primary_context_release(0) == cuda::kSuccess);
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  [[nodiscard]] const shardsnap::CudaFunctions& functions() const { return driver_->functions(); }
  [[nodiscard]] shardsnap::CallerStream stream() const { return reinterpret_cast<shardsnap::CallerStream>(stream_); }

  // Holds the stream until open().
  void hold() {
    CHECK(launch_(stream_, &wait_for_gate, static_cast<void*>(this)) == cuda::kSuccess);
    held_ = true;
  }

  void open() {
    if (held_) {
      gate_.set_value();
      held_ = false;
    }
  }

  void write(Bytes& device, const Bytes& from) {
    CHECK(functions().copy_host_to_device(address_of(device), from.data(), from.size(), stream_) == cuda::kSuccess);
  }

  void raise_flag(cuda::Stream stream, std::atomic<bool>& flag) {
    const auto raise = [](void* raised) { *static_cast<std::atomic<bool>*>(raised) = true; };
    CHECK(launch_(stream, static_cast<cuda::HostFunction>(raise), static_cast<void*>(&flag)) == cuda::kSuccess);
  }

 private:
  static void wait_for_gate(void* caller) { static_cast<Caller*>(caller)->opened_.wait(); }

  std::shared_ptr<const CudaDriver> driver_;
  DriverFunction<cuda::kLaunchHostFunction> launch_;
  cuda::Stream stream_ = nullptr;
  std::promise<void> gate_;
  std::future<void> opened_ = gate_.get_future();
  bool held_ = false;
};

// Declared after the buffers it copies, so that its destructor drains before they go, also when a check fails.
std::shared_ptr<CopyDevice> open_device() { return shardsnap::make_cuda_device(0, kEmulator); }

void copy_and_wait(CopyDevice& device, Direction direction, const CopyRanges& ranges, std::byte* host) {
  device.submit(direction, ranges, host);
  REQUIRE(device.record(direction)->wait(kLongWait));
}

// Ranges of mixed sizes, some of nothing, at unaligned places of the device and packed on the host.
std::vector<CopyRange> mixed_ranges(const Bytes& device) {
  std::vector<std::size_t> sizes(2500);
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    sizes[index] = index % 97 == 0 ? 0 : 1 + index * 7 % 613;
  }
  sizes[100] = std::size_t{1} << 20;
  sizes[101] = (std::size_t{1} << 20) - 1;
  sizes[2400] = (std::size_t{3} << 20) + 5;
  std::vector<CopyRange> ranges;
  std::size_t device_offset = 3;
  std::size_t host_offset = 0;
  for (const std::size_t size : sizes) {
    ranges.push_back({address_of(device) + device_offset, host_offset, size});
    device_offset += size + 2;
    host_offset += size;
  }
  REQUIRE(device_offset < device.size());
  return ranges;
}

constexpr std::size_t kMixedBytes = std::size_t{8} << 20;

// Alive when the process exits, as a Python module's objects may be. This one was constructed before the driver, so its
// device is destroyed after the driver has shut down.
std::shared_ptr<CopyDevice> device_destroyed_after_driver;

// The other way round, but after the locals of the main thread.
std::shared_ptr<CopyDevice>& device_destroyed_before_driver() {
  static std::shared_ptr<CopyDevice> device;
  return device;
}

// Runs in a forked child; the exit code says which step hung back or passed where it must refuse.
int use_in_child(std::shared_ptr<CopyDevice> device, EventPtr event, Bytes& memory) {
  const auto refuses = [](const std::function<void()>& action) {
    try {
      action();
    } catch (const shardsnap::SnapshotError& error) {
      return std::string(error.what()).find("fork") != std::string::npos;
    }
    return false;
  };
  if (!refuses([] { open_device(); })) {
    return 1;
  }
  if (!refuses([&] { device->submit(Direction::kDeviceToHost, whole(memory), memory.data()); })) {
    return 2;
  }
  if (!refuses([&] { static_cast<void>(device->record(Direction::kDeviceToHost)); })) {
    return 3;
  }
  if (!refuses([&] { static_cast<void>(event->wait(kLongWait)); })) {
    return 4;
  }
  if (!refuses([&] { device->register_host(memory.data(), memory.size()); })) {
    return 5;
  }
  device->unregister_host(memory.data());
  device->drain();
  event.reset();
  device.reset();
  return 0;
}

}  // namespace

TEST_SUITE("cuda device") {
  TEST_CASE("ranges of every size travel bit-exact both ways") {
    const Bytes before = random_bytes(kMixedBytes, 1);
    Bytes memory = before;
    const std::vector<CopyRange> ranges = mixed_ranges(memory);
    const std::size_t packed = ranges.back().host_offset + ranges.back().bytes;
    Bytes host(packed);
    const auto device = open_device();

    copy_and_wait(*device, Direction::kDeviceToHost, ranges_of(ranges), host.data());
    for (const CopyRange& range : ranges) {
      const std::size_t offset = range.device - address_of(memory);
      REQUIRE(std::memcmp(host.data() + range.host_offset, before.data() + offset, range.bytes) == 0);
    }
    CHECK(memory == before);

    const Bytes incoming = random_bytes(packed, 2);
    host = incoming;
    Bytes expected = before;
    for (const CopyRange& range : ranges) {
      const std::size_t offset = range.device - address_of(memory);
      std::memcpy(expected.data() + offset, incoming.data() + range.host_offset, range.bytes);
    }
    copy_and_wait(*device, Direction::kHostToDevice, ranges_of(ranges), host.data());
    CHECK(memory == expected);
    CHECK(host == incoming);
  }

  TEST_CASE("small ranges go in batches where the driver has them") {
    Bytes memory(kMixedBytes);
    Bytes host(kMixedBytes);
    const auto device = open_device();
    const std::vector<CopyRange> ranges = mixed_ranges(memory);
    std::uint64_t copies = 0;
    for (const CopyRange& range : ranges) {
      copies += range.bytes > 0 ? 1 : 0;
    }
    const Counts before = emulator_counts();
    copy_and_wait(*device, Direction::kDeviceToHost, ranges_of(ranges), host.data());
    const Counts after = emulator_counts();
    const std::uint64_t large = 2;
    CHECK(after.single_copies - before.single_copies == (batch_expected() ? large : copies));
    CHECK(after.batch_copies - before.batch_copies == (batch_expected() ? copies - large : 0));
    CHECK(after.batch_calls - before.batch_calls == (batch_expected() ? 3 : 0));

    copy_and_wait(*device, Direction::kHostToDevice, ranges_of({ranges[1]}), host.data());
    CHECK(emulator_counts().batch_calls == after.batch_calls);
    CHECK(emulator_counts().single_copies == after.single_copies + 1);
  }

  TEST_CASE("a submission of nothing is done at once") {
    Bytes host(1);
    const auto device = open_device();
    copy_and_wait(*device, Direction::kDeviceToHost, ranges_of({}), host.data());
    copy_and_wait(*device, Direction::kDeviceToHost, ranges_of({{0, 0, 0}}), host.data());
  }

  TEST_CASE("copies wait for the caller's stream") {
    const Bytes written = random_bytes(4096, 3);
    Bytes memory(4096);
    Bytes host(4096);
    Bytes other(16);
    const auto device = open_device();
    Caller caller;
    caller.hold();
    caller.write(memory, written);
    device->order_after_caller(Direction::kDeviceToHost, caller.stream());
    device->submit(Direction::kDeviceToHost, whole(memory), host.data());
    const EventPtr saved = device->record(Direction::kDeviceToHost);
    CHECK_FALSE(saved->wait(kShortWait));
    CHECK_FALSE(saved->done());
    CHECK_FALSE(saved->wait(-1s));

    // The other direction was not told to wait.
    copy_and_wait(*device, Direction::kHostToDevice, whole(other), host.data());

    caller.open();
    CHECK(saved->wait(std::chrono::nanoseconds::max()));
    CHECK(saved->done());
    CHECK(host == written);
  }

  TEST_CASE("the caller's stream waits for copies, the legacy default stream too") {
    Bytes memory = random_bytes(4096, 4);
    Bytes host(4096);
    std::atomic<bool> reached{false};
    std::atomic<bool> legacy_reached{false};
    const auto device = open_device();
    Caller caller;
    Caller gate;
    gate.hold();
    device->order_after_caller(Direction::kDeviceToHost, gate.stream());
    device->submit(Direction::kDeviceToHost, whole(memory), host.data());
    const EventPtr saved = device->record(Direction::kDeviceToHost);
    device->order_caller_after(caller.stream(), saved);
    device->order_caller_after(0, saved);
    caller.raise_flag(reinterpret_cast<cuda::Stream>(caller.stream()), reached);
    caller.raise_flag(nullptr, legacy_reached);
    std::this_thread::sleep_for(kShortWait);
    CHECK_FALSE(reached);
    CHECK_FALSE(legacy_reached);
    gate.open();
    CHECK(caller.functions().stream_synchronize(reinterpret_cast<cuda::Stream>(caller.stream())) == cuda::kSuccess);
    CHECK(caller.functions().stream_synchronize(nullptr) == cuda::kSuccess);
    CHECK(reached);
    CHECK(legacy_reached);
    CHECK(host == memory);
  }

  TEST_CASE("an exchange through one piece of device memory keeps its order") {
    const Bytes live = random_bytes(4096, 5);
    Bytes memory = live;
    Bytes saved(4096);
    Bytes old = random_bytes(4096, 6);
    const auto device = open_device();
    Caller gate;
    gate.hold();
    device->order_after_caller(Direction::kDeviceToHost, gate.stream());
    device->submit(Direction::kDeviceToHost, whole(memory), saved.data());
    device->order_after(Direction::kHostToDevice, device->record(Direction::kDeviceToHost));
    device->submit(Direction::kHostToDevice, whole(memory), old.data());
    const EventPtr loaded = device->record(Direction::kHostToDevice);
    CHECK_FALSE(loaded->wait(kShortWait));
    gate.open();
    REQUIRE(loaded->wait(kLongWait));
    CHECK(saved == live);
    CHECK(memory == old);
  }

  TEST_CASE("events outlive their device, and nothing leaks") {
    const Counts before = emulator_counts();
    Bytes memory = random_bytes(4096, 7);
    Bytes host(4096);
    auto device = open_device();
    device->submit(Direction::kDeviceToHost, whole(memory), host.data());
    EventPtr event = device->record(Direction::kDeviceToHost);
    device.reset();
    CHECK(host == memory);
    CHECK(event->wait(kLongWait));
    CHECK(emulator_counts().context_references == before.context_references + 1);
    CHECK(emulator_counts().events == before.events + 1);
    CHECK(emulator_counts().streams == before.streams);
    event.reset();
    check_nothing_new_lives(before);
  }

  TEST_CASE("events are used again") {
    const Counts before = emulator_counts();
    const auto device = open_device();
    for (int time = 0; time < 200; ++time) {
      device->order_after_caller(Direction::kDeviceToHost, 0);
      CHECK(device->record(Direction::kDeviceToHost)->wait(kLongWait));
    }
    CHECK(emulator_counts().events == before.events + 1);
  }

  TEST_CASE("destruction drains") {
    Bytes memory = random_bytes(std::size_t{4} << 20, 8);
    Bytes host(memory.size());
    open_device()->submit(Direction::kDeviceToHost, whole(memory), host.data());
    CHECK(host == memory);
  }

  TEST_CASE("the thread's own context is left as it was") {
    Bytes memory(64);
    const auto device = open_device();
    const auto driver = CudaDriver::open(kEmulator);
    copy_and_wait(*device, Direction::kHostToDevice, whole(memory), Bytes(64).data());
    device->order_after_caller(Direction::kDeviceToHost, 0);
    cuda::Context context = nullptr;
    CHECK(driver->functions().context_pop(&context) == cuda::kInvalidContext);
    CHECK(driver->functions().event_query(nullptr) == cuda::kInvalidContext);
  }

  TEST_CASE("a failed copy names the range, and the ranges before it arrive") {
    Bytes memory = random_bytes(4096, 9);
    Bytes host(4096);
    const auto device = open_device();
    const CopyRanges ranges = ranges_of({{address_of(memory), 0, 100}, {0, 100, 0}, {8, 100, 77}, {8, 200, 1}});
    const std::string to_host =
        message_of<CopyError>([&] { device->submit(Direction::kDeviceToHost, ranges, host.data()); });
    CHECK(contains(to_host, "cuMemcpyDtoHAsync failed on range 2 (77 bytes, device to host)"));
    CHECK(contains(to_host, "CUDA_ERROR_INVALID_VALUE"));
    device->drain();
    CHECK(std::memcmp(host.data(), memory.data(), 100) == 0);

    const CopyRanges large = ranges_of({{16, 0, std::size_t{2} << 20}});
    const std::string to_device =
        message_of<CopyError>([&] { device->submit(Direction::kHostToDevice, large, host.data()); });
    CHECK(contains(to_device, "cuMemcpyHtoDAsync failed on range 0 (2097152 bytes, host to device)"));

    // The device stays usable.
    copy_and_wait(*device, Direction::kDeviceToHost, whole(memory), host.data());
    CHECK(host == memory);
  }

  TEST_CASE("a stream that does not exist is a CopyError that names the call") {
    const Counts before = emulator_counts();
    {
      const auto device = open_device();
      const std::string message =
          message_of<CopyError>([&] { device->order_after_caller(Direction::kDeviceToHost, 0xdead0); });
      CHECK(contains(message, "cuEventRecord failed: CUDA_ERROR_INVALID_HANDLE"));
      const EventPtr event = device->record(Direction::kDeviceToHost);
      CHECK(contains(message_of<CopyError>([&] { device->order_caller_after(0xdead0, event); }), "cuStreamWaitEvent"));
    }
    check_nothing_new_lives(before);
  }

  TEST_CASE("an event of another engine is refused") {
    class OtherEvent : public shardsnap::Event {
     public:
      [[nodiscard]] bool done() const override { return true; }
      [[nodiscard]] bool wait(std::chrono::nanoseconds /*timeout*/) const override { return true; }
    };
    const auto device = open_device();
    const auto other = std::make_shared<const OtherEvent>();
    CHECK_THROWS_AS(device->order_after(Direction::kDeviceToHost, other), CopyError);
    CHECK_THROWS_AS(device->order_caller_after(0, nullptr), CopyError);
  }

  TEST_CASE("host memory is pinned once, and an error says why not") {
    const Counts before = emulator_counts();
    Bytes memory(8192);
    const auto device = open_device();
    REQUIRE(device->can_register());
    device->register_host(memory.data(), memory.size());
    CHECK(emulator_counts().registrations == before.registrations + 1);
    const std::string twice = message_of<PinningError>([&] { device->register_host(memory.data() + 4096, 4096); });
    CHECK(contains(twice, "cuMemHostRegister of 4096 bytes failed: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"));
    device->unregister_host(memory.data());
    device->unregister_host(memory.data());
    CHECK(emulator_counts().registrations == before.registrations);
    device->register_host(memory.data(), memory.size());
    device->unregister_host(memory.data());

    const EmulatorVariable refusal("SHARDSNAP_EMULATOR_REGISTER_RESULT", "2");
    const CudaDriver reread(kEmulator);
    CHECK(contains(message_of<PinningError>([&] { device->register_host(memory.data(), memory.size()); }),
                   "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"));
  }

  TEST_CASE("several threads share one device") {
    const Counts before = emulator_counts();
    {
      const auto device = open_device();
      std::vector<std::thread> threads;
      std::atomic<int> exact{0};
      for (unsigned int seed = 0; seed < 4; ++seed) {
        threads.emplace_back([&device, &exact, seed] {
          Bytes memory = random_bytes(40000, seed);
          std::vector<CopyRange> ranges;
          for (std::size_t offset = 0; offset < memory.size(); offset += 100) {
            ranges.push_back({address_of(memory) + offset, offset, 100});
          }
          Bytes host(memory.size());
          bool well = true;
          for (int time = 0; time < 20; ++time) {
            host.assign(host.size(), std::byte{0});
            device->order_after_caller(Direction::kDeviceToHost, 0);
            device->submit(Direction::kDeviceToHost, ranges_of(ranges), host.data());
            well = device->record(Direction::kDeviceToHost)->wait(kLongWait) && host == memory && well;
          }
          exact += well ? 1 : 0;
        });
      }
      for (std::thread& thread : threads) {
        thread.join();
      }
      CHECK(exact == 4);
    }
    check_nothing_new_lives(before);
  }

  TEST_CASE("it describes itself") {
    const std::string version = driver_version() == 12000 ? "12.0" : driver_version() == 12080 ? "12.8" : "13.0";
    CHECK(open_device()->describe() == "cuda:0 (Emulated CUDA device, driver " + version + ")");
    CHECK(open_device()->numa_node() == -1);
  }

  TEST_CASE("the driver is loaded once per path") {
    CHECK(CudaDriver::open(kEmulator) == CudaDriver::open(kEmulator));
    CHECK(CudaDriver::open(kEmulator) != CudaDriver::open(fresh_emulator_path()));
    CHECK(CudaDriver::open(kEmulator)->has_copy_batch() == batch_expected());
  }

  TEST_CASE("a forked child is refused, and does not hang") {
    auto device = open_device();
    Bytes memory(4096);
    EventPtr event = device->record(Direction::kDeviceToHost);
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);
      _exit(use_in_child(std::move(device), std::move(event), memory));
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(event->wait(kLongWait));
  }

  TEST_CASE("a device may be alive when the process exits") {
    device_destroyed_after_driver = open_device();
    device_destroyed_before_driver() = open_device();
  }
}

TEST_SUITE("cuda unavailable") {
  TEST_CASE("a missing library is named, with what to do") {
    const std::string message =
        message_of<DeviceUnavailableError>([] { shardsnap::make_cuda_device(0, "/nowhere/libcuda.so.1"); });
    CHECK(contains(message, "/nowhere/libcuda.so.1"));
    CHECK(contains(message, "No such file"));
    CHECK(contains(message, "Install the NVIDIA driver"));
  }

  TEST_CASE("a library that is no CUDA driver is told apart") {
    CHECK(contains(message_of<DeviceUnavailableError>([] { shardsnap::make_cuda_device(0, "libm.so.6"); }),
                   "libm.so.6 exports no cuGetProcAddress_v2"));
  }

  TEST_CASE("no device: the driver's word for it, and CUDA_VISIBLE_DEVICES") {
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    const EmulatorVariable result("SHARDSNAP_EMULATOR_INIT_RESULT", "100");
    const std::string message =
        message_of<DeviceUnavailableError>([] { shardsnap::make_cuda_device(0, fresh_emulator_path()); });
    CHECK(contains(message, "cuInit"));
    CHECK(contains(message, "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)"));
    CHECK(contains(message, "CUDA_VISIBLE_DEVICES is \"\""));
    unsetenv("CUDA_VISIBLE_DEVICES");
  }

  TEST_CASE("a driver that does not start gives its reason") {
    const EmulatorVariable result("SHARDSNAP_EMULATOR_INIT_RESULT", "803");
    const std::string message =
        message_of<DeviceUnavailableError>([] { shardsnap::make_cuda_device(0, fresh_emulator_path()); });
    CHECK(contains(message, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"));
    CHECK(contains(message, "different versions"));
  }

  TEST_CASE("an error that the driver cannot name keeps its number") {
    const EmulatorVariable result("SHARDSNAP_EMULATOR_INIT_RESULT", "4321");
    CHECK(contains(message_of<DeviceUnavailableError>([] { shardsnap::make_cuda_device(0, fresh_emulator_path()); }),
                   "unknown CUresult 4321"));
  }

  TEST_CASE("a driver without devices") {
    const EmulatorVariable devices("SHARDSNAP_EMULATOR_DEVICES", "0");
    CHECK(contains(message_of<DeviceUnavailableError>([] { shardsnap::make_cuda_device(0, fresh_emulator_path()); }),
                   "CUDA_ERROR_NO_DEVICE"));
  }

  TEST_CASE("a failure is not remembered") {
    const std::string path = fresh_emulator_path();
    {
      const EmulatorVariable result("SHARDSNAP_EMULATOR_INIT_RESULT", "999");
      CHECK_THROWS_AS(shardsnap::make_cuda_device(0, path), DeviceUnavailableError);
    }
    CHECK(shardsnap::make_cuda_device(0, path) != nullptr);
  }

  TEST_CASE("an ordinal that does not exist says how many there are") {
    const EmulatorVariable devices("SHARDSNAP_EMULATOR_DEVICES", "2");
    const std::string path = fresh_emulator_path();
    CHECK(shardsnap::make_cuda_device(1, path)->describe().rfind("cuda:1 ", 0) == 0);
    const std::string message = message_of<DeviceUnavailableError>([&] { shardsnap::make_cuda_device(2, path); });
    CHECK(contains(message, "cuda:2 does not exist: the driver shows 2 device(s)"));
    CHECK_THROWS_AS(shardsnap::make_cuda_device(-1, path), DeviceUnavailableError);
  }
}

TEST_SUITE("cuda driver too old") {
  TEST_CASE("a missing function is named" * doctest::skip(driver_version() >= 11000)) {
    CHECK(contains(message_of<DeviceUnavailableError>([] { open_device(); }),
                   "has no function cuDevicePrimaryCtxRelease of version 11000: update the NVIDIA driver"));
  }
}

TEST_SUITE("cuda placement") {
  TEST_CASE("the NUMA node comes from sysfs, or is unknown") {
    namespace files = std::filesystem;
    const files::path root = files::temp_directory_path() / ("shardsnap-sysfs-" + std::to_string(getpid()));
    files::create_directories(root / "devices/system/node");
    const auto write = [](const files::path& path, const char* text) {
      files::create_directories(path.parent_path());
      std::ofstream(path) << text << "\n";
    };
    const auto node = [&root](const char* bus_id) { return shardsnap::pci_numa_node(bus_id, root.string()); };
    write(root / "bus/pci/devices/0000:9b:00.0/numa_node", "1");
    write(root / "bus/pci/devices/0000:9c:00.0/numa_node", "-1");
    write(root / "devices/system/node/online", "0-1");
    CHECK(node("0000:9B:00.0") == 1);
    CHECK(node("0000:9C:00.0") == -1);
    CHECK(node("0000:9D:00.0") == -1);
    write(root / "devices/system/node/online", "0");
    CHECK(node("0000:9B:00.0") == -1);
    files::remove_all(root);
    CHECK(node("0000:9B:00.0") == -1);
  }
}
