// The Python face of the core. Every call that may block releases the GIL, and every wait can be interrupted.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/copy_device.hpp"
#include "device/cpu_device.hpp"
#include "device/cuda_device.hpp"
#include "device/streaming_copy.hpp"
#include "engine/copy_plan.hpp"
#include "engine/device_pinner.hpp"
#include "engine/snapshot_engine.hpp"
#include "engine/ticket.hpp"
#include "errors.hpp"
#include "memory/arena.hpp"

namespace py = pybind11;

namespace shardsnap {
namespace {

using Addresses = py::array_t<std::uint64_t, py::array::c_style | py::array::forcecast>;
using Nanoseconds = std::chrono::nanoseconds;

// Unlike py::gil_scoped_release, it lets the interpreter end a daemon thread at exit: taking the GIL then unwinds the
// thread, which a destructor that must not throw would turn into an abort.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() noexcept(false) { PyEval_RestoreThread(state_); }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// A waiting thread comes back this often to look for a pending KeyboardInterrupt.
constexpr Nanoseconds kSignalPeriod = std::chrono::milliseconds(20);

template <typename Element>
std::vector<Element> to_vector(const Addresses& array) {
  return {array.data(), array.data() + array.size()};
}

// Raises the class of that name in shardsnap.errors.
void raise_python(const char* name, const py::tuple& arguments) {
  const py::object type = py::module_::import("shardsnap.errors").attr(name);
  PyErr_SetObject(type.ptr(), arguments.ptr());
}

void register_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) {
        std::rethrow_exception(std::move(pointer));
      }
    } catch (const ArenaFullError& error) {
      raise_python("ArenaFullError", py::make_tuple(error.what(), error.asked(), error.free(), error.largest_free()));
    } catch (const PinningError& error) {
      raise_python("PinningError", py::make_tuple(error.what()));
    } catch (const CopyError& error) {
      raise_python("CopyError", py::make_tuple(error.what()));
    } catch (const DeviceUnavailableError& error) {
      raise_python("DeviceUnavailableError", py::make_tuple(error.what()));
    } catch (const SnapshotError& error) {
      raise_python("SnapshotError", py::make_tuple(error.what()));
    }
  });
}

PinMode pin_mode(const std::string& pin) {
  if (pin == "require") {
    return PinMode::kRequire;
  }
  if (pin == "prefer") {
    return PinMode::kPrefer;
  }
  if (pin == "never") {
    return PinMode::kNever;
  }
  throw py::value_error(R"(pin must be "require", "prefer" or "never", got ")" + pin + "\"");
}

std::shared_ptr<Arena> create_arena(const std::shared_ptr<CopyDevice>& device, std::size_t capacity, std::size_t growth,
                                    int numa_node, unsigned threads, bool huge_pages, const std::string& pin) {
  ArenaOptions options;
  options.capacity = capacity;
  options.growth = growth;
  options.numa_node = numa_node;
  options.prefault_threads = threads;
  options.huge_pages = huge_pages;
  options.pin = pin_mode(pin);
  if (device != nullptr && device->can_register()) {
    options.pinner = std::make_shared<DevicePinner>(device);
  }
  const ReleasedGil unlocked;
  return make_arena(options);
}

// True when the copy is done within `timeout` seconds; None waits for ever. KeyboardInterrupt comes through.
bool wait_interruptibly(Ticket& ticket, std::optional<double> timeout) {
  using Clock = std::chrono::steady_clock;
  const bool forever = !timeout || !std::isfinite(*timeout);
  const auto deadline =
      Clock::now() + (forever ? Clock::duration::zero()
                              : std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*timeout)));
  while (true) {
    Nanoseconds slice = kSignalPeriod;
    if (!forever) {
      const Nanoseconds left = deadline - Clock::now();
      slice = std::max(Nanoseconds::zero(), std::min(slice, left));
    }
    bool done = false;
    {
      const ReleasedGil unlocked;
      done = ticket.wait(slice);
    }
    if (done) {
      return true;
    }
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    if (!forever && Clock::now() >= deadline) {
      return false;
    }
  }
}

void bind_device(py::module_& module) {
  py::class_<CopyDevice, std::shared_ptr<CopyDevice>>(module, "CopyDevice")
      .def("describe", &CopyDevice::describe)
      .def_property_readonly("numa_node", &CopyDevice::numa_node)
      .def_property_readonly("can_register", &CopyDevice::can_register);
  module.def("make_cpu_device", &make_cpu_device, py::arg("threads") = 0, py::call_guard<ReleasedGil>());
  module.def("make_cuda_device", &make_cuda_device, py::arg("ordinal"), py::arg("library") = "",
             py::call_guard<ReleasedGil>());
  module.def("streaming_copy_isa", &streaming_copy_isa);
}

void bind_memory(py::module_& module) {
  py::class_<ArenaStats>(module, "ArenaStats")
      .def_readonly("limit", &ArenaStats::limit)
      .def_readonly("mapped", &ArenaStats::mapped)
      .def_readonly("used", &ArenaStats::used)
      .def_readonly("free", &ArenaStats::free)
      .def_readonly("largest_free", &ArenaStats::largest_free)
      .def_readonly("pinned", &ArenaStats::pinned)
      .def_readonly("slabs", &ArenaStats::slabs)
      .def_readonly("extents", &ArenaStats::extents)
      .def_readonly("numa_node", &ArenaStats::numa_node)
      .def_readonly("pin_failure", &ArenaStats::pin_failure);
  // The buffer keeps the extent alive, so a tensor made of it never dangles.
  py::class_<Extent, std::shared_ptr<Extent>>(module, "Extent", py::buffer_protocol())
      .def_property_readonly("address",
                             [](const Extent& extent) { return reinterpret_cast<std::uintptr_t>(extent.data()); })
      .def_property_readonly("bytes", &Extent::bytes)
      .def_buffer([](Extent& extent) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(extent.data()),
                               static_cast<py::ssize_t>(extent.bytes()));
      });
  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      .def(py::init(&create_arena), py::arg("device"), py::kw_only(), py::arg("capacity"), py::arg("growth") = 0,
           py::arg("numa_node") = -1, py::arg("threads") = 0, py::arg("huge_pages") = true, py::arg("pin") = "prefer")
      .def("allocate", &Arena::allocate, py::arg("bytes"), py::call_guard<ReleasedGil>())
      .def("stats", &Arena::stats)
      .def("close", &Arena::close, py::call_guard<ReleasedGil>());
}

void bind_engine(py::module_& module) {
  module.def(
      "pack_regions",
      [](const Addresses& addresses, const Addresses& bytes) {
        const HostPacking packing = pack_regions(to_vector<std::uintptr_t>(addresses), to_vector<std::size_t>(bytes));
        return py::make_tuple(Addresses(static_cast<py::ssize_t>(packing.offsets.size()), packing.offsets.data()),
                              packing.bytes);
      },
      py::arg("addresses"), py::arg("bytes"));
  py::class_<CopyPlan>(module, "CopyPlan")
      .def(py::init([](const Addresses& addresses, const Addresses& offsets, const Addresses& bytes,
                       std::size_t chunk_bytes) {
             return std::make_unique<CopyPlan>(to_vector<std::uintptr_t>(addresses), to_vector<std::size_t>(offsets),
                                               to_vector<std::size_t>(bytes), chunk_bytes);
           }),
           py::arg("addresses"), py::arg("offsets"), py::arg("bytes"), py::kw_only(), py::arg("chunk_bytes"))
      .def_property_readonly("bytes", &CopyPlan::bytes)
      .def_property_readonly("host_bytes", &CopyPlan::host_bytes)
      .def_property_readonly("copies", [](const CopyPlan& plan) { return plan.ranges()->size(); });
  py::class_<Ticket, std::shared_ptr<Ticket>>(module, "Ticket")
      .def("done", &Ticket::done, py::call_guard<ReleasedGil>())
      .def("wait", &wait_interruptibly, py::arg("timeout") = py::none())
      .def("error", &Ticket::error, py::call_guard<ReleasedGil>())
      .def_property_readonly("bytes", &Ticket::bytes);
  py::class_<SnapshotEngine, std::shared_ptr<SnapshotEngine>>(module, "SnapshotEngine")
      .def(py::init<std::shared_ptr<CopyDevice>>(), py::arg("device"))
      .def("save", &SnapshotEngine::save, py::arg("plan"), py::arg("extent"), py::arg("base"), py::kw_only(),
           py::arg("caller"), py::arg("hold_caller"), py::call_guard<ReleasedGil>())
      .def("restore", &SnapshotEngine::restore, py::arg("plan"), py::arg("extent"), py::arg("base"), py::kw_only(),
           py::arg("caller"), py::call_guard<ReleasedGil>())
      .def("fence", &SnapshotEngine::fence, py::arg("caller"), py::call_guard<ReleasedGil>())
      .def("drain", &SnapshotEngine::drain, py::call_guard<ReleasedGil>())
      .def("in_flight", &SnapshotEngine::in_flight, py::call_guard<ReleasedGil>());
}

}  // namespace
}  // namespace shardsnap

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ core of shardsnap; an internal module without a stable interface.";
  shardsnap::register_errors();
  shardsnap::bind_device(module);
  shardsnap::bind_memory(module);
  shardsnap::bind_engine(module);
}
