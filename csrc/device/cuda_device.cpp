#include "device/cuda_device.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda_driver.hpp"
#include "errors.hpp"

namespace shardsnap {
namespace {

constexpr int kNameLength = 256;
constexpr int kPciBusIdLength = 32;
constexpr std::size_t kSmallRange = std::size_t{1} << 20;
constexpr std::size_t kBatchCapacity = 1024;
constexpr std::chrono::microseconds kSpinTime{50};
constexpr std::chrono::microseconds kFirstSleep{10};
constexpr std::chrono::microseconds kLongestSleep{200};

cuda::Stream as_stream(CallerStream caller) { return reinterpret_cast<cuda::Stream>(caller); }

const char* direction_text(Direction direction) {
  return direction == Direction::kDeviceToHost ? "device to host" : "host to device";
}

// The reference on a device's primary context, the context that torch uses. Shared by all that lives in it.
class PrimaryContext {
 public:
  PrimaryContext(std::shared_ptr<const CudaDriver> driver, int ordinal)
      : driver_(std::move(driver)), device_(find_device(*driver_, ordinal)) {
    driver_->call<DeviceUnavailableError>(functions().primary_context_retain, &context_, device_);
  }

  ~PrimaryContext() {
    if (driver_->usable()) {
      functions().primary_context_release(device_);
    }
  }

  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  [[nodiscard]] const CudaDriver& driver() const { return *driver_; }
  [[nodiscard]] const CudaFunctions& functions() const { return driver_->functions(); }
  [[nodiscard]] cuda::Device device() const { return device_; }
  [[nodiscard]] cuda::Context handle() const { return context_; }

 private:
  static cuda::Device find_device(const CudaDriver& driver, int ordinal) {
    int count = 0;
    driver.call<DeviceUnavailableError>(driver.functions().device_get_count, &count);
    if (ordinal < 0 || ordinal >= count) {
      throw DeviceUnavailableError("cuda:" + std::to_string(ordinal) + " does not exist: the driver shows " +
                                   std::to_string(count) + " device(s), numbered from 0; " + visible_devices_text());
    }
    cuda::Device device = 0;
    driver.call<DeviceUnavailableError>(driver.functions().device_get, &device, ordinal);
    return device;
  }

  std::shared_ptr<const CudaDriver> driver_;
  cuda::Device device_;
  cuda::Context context_ = nullptr;
};

// Makes the context current for a scope, whatever the caller's thread had current. Never throws: destructors use it,
// and stay silent in a forked child or once the driver is shutting down.
class ContextGuard {
 public:
  explicit ContextGuard(const PrimaryContext& context) noexcept
      : context_(context),
        result_(context.driver().usable() ? context.functions().context_push(context.handle())
                                          : cuda::kNotInitialized) {}

  ~ContextGuard() {
    if (entered()) {
      cuda::Context popped = nullptr;
      context_.functions().context_pop(&popped);
    }
  }

  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

  [[nodiscard]] bool entered() const noexcept { return result_ == cuda::kSuccess; }

 protected:
  template <typename Error>
  void require_entered() const {
    context_.driver().require_usable<Error>();
    if (!entered()) {
      throw Error(std::string(context_.functions().context_push.name()) +
                  " failed: " + context_.driver().error_text(result_));
    }
  }

 private:
  const PrimaryContext& context_;
  cuda::Result result_;
};

// The same for code that cannot go on without the context.
template <typename Error>
class RequiredContext : public ContextGuard {
 public:
  explicit RequiredContext(const PrimaryContext& context) : ContextGuard(context) {
    this->template require_entered<Error>();
  }
};

// Keeps driver events for reuse: creating one costs more than recording one.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<const PrimaryContext> context) : context_(std::move(context)) {}

  ~EventPool() {
    const ContextGuard guard(*context_);
    if (guard.entered()) {
      for (cuda::StreamEvent event : free_) {
        context_->functions().event_destroy(event);
      }
    }
  }

  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  [[nodiscard]] const PrimaryContext& context() const { return *context_; }

  // Only with the context current.
  [[nodiscard]] cuda::StreamEvent acquire() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      const cuda::StreamEvent event = free_.back();
      free_.pop_back();
      return event;
    }
    reserve_for(created_ + 1);
    cuda::StreamEvent event = nullptr;
    context_->driver().call<CopyError>(context_->functions().event_create, &event, cuda::kEventDisableTiming);
    ++created_;
    return event;
  }

  void release(cuda::StreamEvent event) noexcept {
    // Before the lock: in a forked child another thread of the parent may hold it forever.
    if (!context_->driver().usable()) {
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }

 private:
  // Room for every event there is, so that release() never allocates.
  void reserve_for(std::size_t events) {
    if (free_.capacity() < events) {
      free_.reserve(2 * events);
    }
  }

  std::shared_ptr<const PrimaryContext> context_;
  std::mutex mutex_;
  std::vector<cuda::StreamEvent> free_;
  std::size_t created_ = 0;
};

// An event on loan from the pool. It may go back while work still waits on it: a wait holds what was recorded when it
// was enqueued.
class PooledEvent {
 public:
  explicit PooledEvent(std::shared_ptr<EventPool> pool) : pool_(std::move(pool)), event_(pool_->acquire()) {}
  ~PooledEvent() { pool_->release(event_); }
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;

  [[nodiscard]] const PrimaryContext& context() const { return pool_->context(); }
  [[nodiscard]] cuda::StreamEvent handle() const { return event_; }

  void record(cuda::Stream stream) const {
    context().driver().call<CopyError>(context().functions().event_record, event_, stream);
  }

 private:
  std::shared_ptr<EventPool> pool_;
  cuda::StreamEvent event_;
};

class CudaEvent : public Event {
 public:
  // Only with the context current.
  CudaEvent(std::shared_ptr<EventPool> pool, cuda::Stream stream) : event_(std::move(pool)) { event_.record(stream); }

  [[nodiscard]] bool done() const override {
    const PrimaryContext& context = event_.context();
    const RequiredContext<CopyError> current(context);
    const cuda::Result result = context.functions().event_query(event_.handle());
    if (result == cuda::kSuccess || result == cuda::kNotReady) {
      return result == cuda::kSuccess;
    }
    throw CopyError(std::string("the work before an event failed: ") + context.functions().event_query.name() +
                    " gave " + context.driver().error_text(result));
  }

  [[nodiscard]] bool wait(std::chrono::nanoseconds timeout) const override {
    const auto start = std::chrono::steady_clock::now();
    std::chrono::nanoseconds sleep = kFirstSleep;
    while (!done()) {
      const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - start;
      if (waited >= timeout) {
        return false;
      }
      if (waited >= kSpinTime) {
        std::this_thread::sleep_for(std::min(sleep, timeout - waited));
        sleep = std::min<std::chrono::nanoseconds>(2 * sleep, kLongestSleep);
      }
    }
    return true;
  }

  [[nodiscard]] cuda::StreamEvent handle() const { return event_.handle(); }
  [[nodiscard]] const CudaDriver& driver() const { return event_.context().driver(); }

 private:
  PooledEvent event_;
};

// The stream of one direction, and how ranges get onto it.
class CopyStream {
 public:
  CopyStream(std::shared_ptr<const PrimaryContext> context, Direction direction)
      : context_(std::move(context)), direction_(direction), batching_(context_->driver().has_copy_batch()) {
    const RequiredContext<DeviceUnavailableError> current(*context_);
    context_->driver().call<DeviceUnavailableError>(context_->functions().stream_create, &stream_,
                                                    cuda::kStreamNonBlocking);
  }

  ~CopyStream() {
    const ContextGuard guard(*context_);
    if (guard.entered()) {
      context_->functions().stream_synchronize(stream_);
      context_->functions().stream_destroy(stream_);
    }
  }

  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  [[nodiscard]] cuda::Stream handle() const { return stream_; }

  void drain() const noexcept {
    const ContextGuard guard(*context_);
    if (guard.entered()) {
      context_->functions().stream_synchronize(stream_);
    }
  }

  void submit(const std::vector<CopyRange>& ranges, std::byte* host_base) {
    const RequiredContext<CopyError> current(*context_);
    const std::lock_guard<std::mutex> lock(mutex_);
    batch_size_ = 0;
    for (std::size_t index = 0; index < ranges.size(); ++index) {
      const CopyRange& range = ranges[index];
      if (range.bytes == 0) {
        continue;  // the batch call refuses a copy of nothing
      }
      if (batching_ && range.bytes < kSmallRange) {
        add_to_batch(index, range, host_base);
      } else {
        copy_one(index, range, host_base);
      }
      if (batch_size_ == kBatchCapacity) {
        flush_batch(ranges, host_base);
      }
    }
    flush_batch(ranges, host_base);
  }

 private:
  // Fixed arrays, so that submitting allocates nothing.
  struct BatchScratch {
    std::array<cuda::DevicePointer, kBatchCapacity> to;
    std::array<cuda::DevicePointer, kBatchCapacity> from;
    std::array<std::size_t, kBatchCapacity> bytes;
    std::array<std::size_t, kBatchCapacity> range_index;
  };

  void add_to_batch(std::size_t index, const CopyRange& range, std::byte* host_base) {
    const auto host = reinterpret_cast<std::uintptr_t>(host_base + range.host_offset);
    const bool to_host = direction_ == Direction::kDeviceToHost;
    batch_.to[batch_size_] = to_host ? host : range.device;
    batch_.from[batch_size_] = to_host ? range.device : host;
    batch_.bytes[batch_size_] = range.bytes;
    batch_.range_index[batch_size_] = index;
    ++batch_size_;
  }

  void flush_batch(const std::vector<CopyRange>& ranges, std::byte* host_base) {
    const std::size_t size = std::exchange(batch_size_, 0);
    if (size > 1) {
      const cuda::Result result =
          context_->driver().copy_batch(batch_.to.data(), batch_.from.data(), batch_.bytes.data(), size, stream_);
      if (result == cuda::kSuccess) {
        return;
      }
      batching_ = batching_ && result != cuda::kNotSupported;
    }
    // One by one also after a refused batch: that finds the range at fault, or succeeds where only batching fails.
    for (std::size_t position = 0; position < size; ++position) {
      const std::size_t index = batch_.range_index[position];
      copy_one(index, ranges[index], host_base);
    }
  }

  void copy_one(std::size_t index, const CopyRange& range, std::byte* host_base) const {
    std::byte* host = host_base + range.host_offset;
    const CudaFunctions& functions = context_->functions();
    const bool to_host = direction_ == Direction::kDeviceToHost;
    const cuda::Result result = to_host ? functions.copy_device_to_host(host, range.device, range.bytes, stream_)
                                        : functions.copy_host_to_device(range.device, host, range.bytes, stream_);
    if (result != cuda::kSuccess) {
      const char* call = to_host ? functions.copy_device_to_host.name() : functions.copy_host_to_device.name();
      throw CopyError(std::string(call) + " failed on range " + std::to_string(index) + " (" +
                      std::to_string(range.bytes) + " bytes, " + direction_text(direction_) +
                      "): " + context_->driver().error_text(result));
    }
  }

  std::shared_ptr<const PrimaryContext> context_;
  Direction direction_;
  cuda::Stream stream_ = nullptr;
  std::mutex mutex_;
  bool batching_;
  std::size_t batch_size_ = 0;
  BatchScratch batch_{};
};

std::string device_name(const PrimaryContext& context) {
  std::array<char, kNameLength> name{};
  context.driver().call<DeviceUnavailableError>(context.functions().device_get_name, name.data(), kNameLength,
                                                context.device());
  return name.data();
}

std::string pci_bus_id(const PrimaryContext& context) {
  std::array<char, kPciBusIdLength> bus_id{};
  context.driver().call<DeviceUnavailableError>(context.functions().device_get_pci_bus_id, bus_id.data(),
                                                kPciBusIdLength, context.device());
  return bus_id.data();
}

class CudaDevice : public CopyDevice {
 public:
  CudaDevice(int ordinal, const std::string& library)
      : context_(std::make_shared<const PrimaryContext>(CudaDriver::open(library), ordinal)),
        events_(std::make_shared<EventPool>(context_)),
        device_to_host_(context_, Direction::kDeviceToHost),
        host_to_device_(context_, Direction::kHostToDevice),
        description_("cuda:" + std::to_string(ordinal) + " (" + device_name(*context_) + ", driver " +
                     context_->driver().version_text() + ")"),
        numa_node_(pci_numa_node(pci_bus_id(*context_), "/sys")) {}

  [[nodiscard]] std::string describe() const override { return description_; }

  void order_after_caller(Direction direction, CallerStream caller) override {
    const RequiredContext<CopyError> current(*context_);
    const PooledEvent event(events_);
    event.record(as_stream(caller));
    make_wait(stream(direction).handle(), event.handle());
  }

  void order_after(Direction direction, const EventPtr& event) override {
    const RequiredContext<CopyError> current(*context_);
    make_wait(stream(direction).handle(), own_event(event).handle());
  }

  void order_caller_after(CallerStream caller, const EventPtr& event) override {
    const RequiredContext<CopyError> current(*context_);
    make_wait(as_stream(caller), own_event(event).handle());
  }

  void submit(Direction direction, const CopyRanges& ranges, std::byte* host_base) override {
    stream(direction).submit(*ranges, host_base);
  }

  [[nodiscard]] EventPtr record(Direction direction) override {
    const RequiredContext<CopyError> current(*context_);
    return std::make_shared<const CudaEvent>(events_, stream(direction).handle());
  }

  void drain() noexcept override {
    device_to_host_.drain();
    host_to_device_.drain();
  }

  [[nodiscard]] bool can_register() const override { return true; }

  void register_host(void* address, std::size_t bytes) override {
    const RequiredContext<PinningError> current(*context_);
    const CudaFunctions& functions = context_->functions();
    const cuda::Result result = functions.host_register(address, bytes, cuda::kHostRegisterPortable);
    if (result != cuda::kSuccess) {
      throw PinningError(std::string(functions.host_register.name()) + " of " + std::to_string(bytes) +
                         " bytes failed: " + context_->driver().error_text(result));
    }
  }

  void unregister_host(void* address) noexcept override {
    const ContextGuard guard(*context_);
    if (guard.entered()) {
      context_->functions().host_unregister(address);
    }
  }

  [[nodiscard]] int numa_node() const override { return numa_node_; }

 private:
  CopyStream& stream(Direction direction) {
    return direction == Direction::kDeviceToHost ? device_to_host_ : host_to_device_;
  }

  // An event of another engine or driver library is no handle that this driver may see.
  [[nodiscard]] const CudaEvent& own_event(const EventPtr& event) const {
    const auto* recorded = dynamic_cast<const CudaEvent*>(event.get());
    if (recorded == nullptr || &recorded->driver() != &context_->driver()) {
      throw CopyError(description_ + " did not record this event");
    }
    return *recorded;
  }

  void make_wait(cuda::Stream stream, cuda::StreamEvent event) const {
    context_->driver().call<CopyError>(context_->functions().stream_wait_event, stream, event, 0U);
  }

  std::shared_ptr<const PrimaryContext> context_;
  std::shared_ptr<EventPool> events_;
  CopyStream device_to_host_;
  CopyStream host_to_device_;
  std::string description_;
  int numa_node_;
};

}  // namespace

int pci_numa_node(const std::string& bus_id, const std::string& sysfs_root) {
  std::string online;
  std::ifstream(sysfs_root + "/devices/system/node/online") >> online;
  if (online.find_first_of(",-") == std::string::npos) {
    return -1;  // a single node, or a kernel without NUMA
  }
  std::string directory = bus_id;  // the driver writes upper case, sysfs lower case
  std::transform(directory.begin(), directory.end(), directory.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  int node = -1;
  std::ifstream file(sysfs_root + "/bus/pci/devices/" + directory + "/numa_node");
  return file >> node && node >= 0 ? node : -1;
}

std::shared_ptr<CopyDevice> make_cuda_device(int ordinal, const std::string& library) {
  return std::make_shared<CudaDevice>(ordinal, library);
}

}  // namespace shardsnap
