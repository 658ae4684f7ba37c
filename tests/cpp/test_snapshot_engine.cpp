#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copies.hpp"
#include "device/cpu_device.hpp"
#include "engine/copy_plan.hpp"
#include "engine/snapshot_engine.hpp"
#include "engine/ticket.hpp"
#include "errors.hpp"
#include "held_page.hpp"
#include "memory/arena.hpp"

namespace {

using namespace std::chrono_literals;
using shardsnap::Arena;
using shardsnap::ArenaOptions;
using shardsnap::CallerStream;
using shardsnap::CopyDevice;
using shardsnap::CopyError;
using shardsnap::CopyPlan;
using shardsnap::CopyRange;
using shardsnap::CopyRanges;
using shardsnap::Direction;
using shardsnap::Event;
using shardsnap::EventPtr;
using shardsnap::Extent;
using shardsnap::make_cpu_device;
using shardsnap::PinMode;
using shardsnap::SnapshotEngine;
using shardsnap::Ticket;

using Calls = std::vector<std::string>;

constexpr auto kLongWait = 20s;
// Long enough for work that is wrongly not held back to show up.
constexpr auto kShortWait = 20ms;
constexpr CallerStream kCaller = 42;
constexpr std::size_t kChunk = 10000;

std::shared_ptr<Arena> open_arena(std::size_t capacity) {
  ArenaOptions options;
  options.capacity = capacity;
  options.pin = PinMode::kNever;
  return shardsnap::make_arena(options);
}

CopyPlan plan_of(const std::byte* memory, std::size_t bytes) { return {{address_of(memory)}, {0}, {bytes}, kChunk}; }
CopyPlan plan_of(const Bytes& memory) { return plan_of(memory.data(), memory.size()); }

// Weights in many pieces, some of them neighbours, and the plan of them.
class Weights {
 public:
  explicit Weights(std::uint64_t seed) : memory_(random_bytes(300000, seed)), packing_(pack()) {}

  [[nodiscard]] CopyPlan plan() const { return {addresses_, packing_.offsets, sizes_, kChunk}; }

  [[nodiscard]] Bytes planned() const {
    Bytes bytes;
    for (std::size_t index = 0; index < addresses_.size(); ++index) {
      const auto* const first = reinterpret_cast<const std::byte*>(addresses_[index]);
      bytes.insert(bytes.end(), first, first + sizes_[index]);
    }
    return bytes;
  }

  // Changes every byte, those between the pieces included.
  void change(std::uint64_t seed) {
    const Bytes other = random_bytes(memory_.size(), seed);
    std::copy(other.begin(), other.end(), memory_.begin());
  }

  [[nodiscard]] const Bytes& memory() const { return memory_; }

 private:
  shardsnap::HostPacking pack() {
    std::mt19937_64 engine(memory_.size());
    for (std::size_t at = 0; at < memory_.size();) {
      const std::size_t bytes = std::min(engine() % 9000, memory_.size() - at);
      addresses_.push_back(address_of(memory_) + at);
      sizes_.push_back(bytes);
      at += bytes + (engine() % 2 == 0 ? 0 : engine() % 300);
    }
    return shardsnap::pack_regions(addresses_, sizes_);
  }

  Bytes memory_;
  std::vector<std::uintptr_t> addresses_;
  std::vector<std::size_t> sizes_;
  shardsnap::HostPacking packing_;
};

// A point in a stream that is reached, or fails, when the test says so.
class ManualEvent final : public Event {
 public:
  explicit ManualEvent(std::string name) : name_(std::move(name)) {}

  [[nodiscard]] bool done() const override {
    if (failed_) {
      throw CopyError("the work before " + name_ + " failed");
    }
    return reached_;
  }
  [[nodiscard]] bool wait(std::chrono::nanoseconds /*timeout*/) const override { return done(); }

  void reach() const { reached_ = true; }
  void fail() const { failed_ = true; }
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  std::string name_;
  mutable std::atomic<bool> reached_{false};
  mutable std::atomic<bool> failed_{false};
};

// Copies nothing; writes down what it is asked for and fails when told to.
class FakeDevice final : public CopyDevice {
 public:
  [[nodiscard]] std::string describe() const override { return "fake"; }

  void order_after_caller(Direction direction, CallerStream caller) override {
    call(name(direction) + " after caller " + std::to_string(caller));
  }
  void order_after(Direction direction, const EventPtr& event) override {
    call(name(direction) + " after " + dynamic_cast<const ManualEvent&>(*event).name());
  }
  void order_caller_after(CallerStream caller, const EventPtr& event) override {
    call("caller " + std::to_string(caller) + " after " + dynamic_cast<const ManualEvent&>(*event).name());
  }
  void submit(Direction direction, const CopyRanges& ranges, std::byte* /*host_base*/) override {
    call(name(direction) + " copies " + std::to_string(ranges->size()));
  }
  [[nodiscard]] EventPtr record(Direction direction) override {
    call(name(direction) + " records");
    auto event = std::make_shared<ManualEvent>(name(direction) + std::to_string(++events_));
    recorded.push_back(event);
    return event;
  }
  void drain() noexcept override { calls.emplace_back("drain"); }
  [[nodiscard]] bool can_register() const override { return false; }
  void register_host(void* /*address*/, std::size_t /*bytes*/) override {}
  void unregister_host(void* /*address*/) noexcept override {}
  [[nodiscard]] int numa_node() const override { return -1; }

  // The calls since the last time.
  [[nodiscard]] Calls take_calls() { return std::exchange(calls, {}); }

  Calls calls;
  std::vector<std::shared_ptr<const ManualEvent>> recorded;
  std::size_t fail_at = 0;  // the number, from 1 on, of the call that throws; 0 for none

 private:
  static std::string name(Direction direction) { return direction == Direction::kDeviceToHost ? "save" : "restore"; }

  void call(std::string text) {
    calls.push_back(std::move(text));
    if (fail_at == calls.size()) {
      throw CopyError(calls.back() + " failed");
    }
  }

  int events_ = 0;
};

// An engine over a fake device, and memory to save.
struct Bench {
  std::shared_ptr<FakeDevice> device = std::make_shared<FakeDevice>();
  SnapshotEngine engine{device};
  std::shared_ptr<Arena> arena = open_arena(1 << 20);
  Bytes memory = random_bytes(25000, 1);
  CopyPlan plan = plan_of(memory);

  std::shared_ptr<Ticket> save(bool hold_caller = true) {
    return engine.save(plan, arena->allocate(plan.host_bytes()), 0, kCaller, hold_caller);
  }
  std::shared_ptr<Ticket> restore() { return engine.restore(plan, arena->allocate(plan.host_bytes()), 0, kCaller); }
};

}  // namespace

TEST_SUITE("engine") {
  TEST_CASE("what is saved comes back bit for bit, and nothing else is written") {
    for (const unsigned threads : {1U, 4U}) {
      CAPTURE(threads);
      Weights weights(threads);
      const CopyPlan plan = weights.plan();
      const auto arena = open_arena(4 << 20);
      SnapshotEngine engine(make_cpu_device(threads));
      for (const std::size_t base : {std::size_t{0}, std::size_t{4096}, std::size_t{4160}}) {
        CAPTURE(base);
        weights.change(base + 100);
        const auto extent = arena->allocate(base + plan.host_bytes() + 5000);
        std::memset(extent->data(), 0xA5, extent->bytes());
        const Bytes saved = weights.planned();
        CHECK(engine.save(plan, extent, base, kCaller, true)->wait(kLongWait));
        const auto untouched = [](std::byte byte) { return byte == std::byte{0xA5}; };
        CHECK(std::all_of(extent->data(), extent->data() + base, untouched));
        CHECK(std::all_of(extent->data() + base + plan.host_bytes(), extent->data() + extent->bytes(), untouched));

        weights.change(base + 200);
        Bytes between = weights.memory();
        const auto ticket = engine.restore(plan, extent, base, kCaller);
        CHECK(ticket->wait(kLongWait));
        CHECK(ticket->bytes() == saved.size());
        CHECK((weights.planned() == saved));
        for (const CopyRange& range : *plan.ranges()) {
          std::memcpy(between.data() + (range.device - address_of(weights.memory())),
                      reinterpret_cast<const std::byte*>(range.device), range.bytes);
        }
        CHECK((between == weights.memory()));
      }
    }
  }

  TEST_CASE("many versions in flight at once") {
    Weights weights(1);
    const CopyPlan plan = weights.plan();
    const auto arena = open_arena(16 << 20);
    SnapshotEngine engine(make_cpu_device(3));
    std::vector<std::shared_ptr<Extent>> extents;
    std::vector<Bytes> expected;
    for (std::uint64_t version = 0; version < 20; ++version) {
      weights.change(version);
      expected.push_back(weights.planned());
      extents.push_back(arena->allocate(plan.host_bytes()));
      CHECK(engine.save(plan, extents.back(), 0, kCaller, true)->wait(kLongWait));
    }
    std::mt19937_64 engine_of_chance(2);
    for (int round = 0; round < 200; ++round) {
      std::size_t version = 0;
      for (int restores = 0; restores < 3; ++restores) {  // the last one wins
        version = engine_of_chance() % extents.size();
        static_cast<void>(engine.restore(plan, extents[version], 0, kCaller));
      }
      const std::size_t target = engine_of_chance() % extents.size();
      const auto extent = arena->allocate(plan.host_bytes());
      CHECK(engine.save(plan, extent, 0, kCaller, true)->wait(kLongWait));
      REQUIRE((weights.planned() == expected[version]));
      extents[target] = extent;
      expected[target] = expected[version];
    }
  }

  TEST_CASE("a restore waits for the save that still reads the weights") {
    Bytes weights(1000, std::byte{2});
    const CopyPlan plan = plan_of(weights);
    const auto arena = open_arena(1 << 20);
    const auto old_version = arena->allocate(weights.size());
    std::memset(old_version->data(), 9, old_version->bytes());
    const auto extent = arena->allocate(weights.size());
    SnapshotEngine engine(make_cpu_device(2));
    HeldPage page;
    // The save of the weights has to wait for the save of the page, and so it reads them late.
    static_cast<void>(
        engine.save(plan_of(page.data(), HeldPage::kBytes), arena->allocate(HeldPage::kBytes), 0, kCaller, false));
    const auto saved = engine.save(plan, extent, 0, kCaller, false);
    const auto restored = engine.restore(plan, old_version, 0, kCaller);
    page.wait_until_touched();
    CHECK_FALSE(restored->wait(kShortWait));
    CHECK_FALSE(saved->done());
    page.open();
    CHECK(restored->wait(kLongWait));
    CHECK(saved->done());
    CHECK(weights == Bytes(1000, std::byte{9}));
    CHECK(std::all_of(extent->data(), extent->data() + 1000, [](std::byte byte) { return byte == std::byte{2}; }));
  }

  TEST_CASE("a save waits for the restore that still writes the weights") {
    const auto arena = open_arena(1 << 20);
    const auto old_version = arena->allocate(HeldPage::kBytes);
    std::memset(old_version->data(), 9, old_version->bytes());
    const auto extent = arena->allocate(HeldPage::kBytes);
    SnapshotEngine engine(make_cpu_device(2));
    HeldPage page;
    page.fill(std::byte{1});
    const CopyPlan plan = plan_of(page.data(), HeldPage::kBytes);
    const auto restored = engine.restore(plan, old_version, 0, kCaller);
    const auto saved = engine.save(plan, extent, 0, kCaller, false);
    page.wait_until_touched();
    CHECK_FALSE(saved->wait(kShortWait));
    CHECK_FALSE(restored->done());
    page.open();
    CHECK(saved->wait(kLongWait));
    CHECK(std::memcmp(extent->data(), old_version->data(), HeldPage::kBytes) == 0);
  }

  TEST_CASE("an extent lives for as long as its copy, also when the ticket is dropped") {
    const auto arena = open_arena(1 << 20);
    SnapshotEngine engine(make_cpu_device(2));
    HeldPage page;
    page.fill(std::byte{1});
    const CopyPlan plan = plan_of(page.data(), HeldPage::kBytes);
    std::weak_ptr<Extent> extent;
    {
      const auto taken = arena->allocate(HeldPage::kBytes);
      extent = taken;
      static_cast<void>(engine.save(plan, taken, 0, kCaller, false));
    }
    page.wait_until_touched();
    CHECK(engine.in_flight() == 1);
    CHECK_FALSE(extent.expired());
    CHECK(arena->stats().extents == 1);
    page.open();
    engine.drain();
    CHECK(engine.in_flight() == 0);
    CHECK(extent.expired());
    CHECK(arena->stats().extents == 0);
  }

  TEST_CASE("an engine waits for its copies when it is destroyed") {
    const auto arena = open_arena(1 << 20);
    const auto device = make_cpu_device(2);  // outlives the engine, and so waits for nothing
    auto engine = std::make_unique<SnapshotEngine>(device);
    HeldPage page;
    const auto ticket =
        engine->save(plan_of(page.data(), HeldPage::kBytes), arena->allocate(HeldPage::kBytes), 0, kCaller, false);
    page.wait_until_touched();
    auto destroyed = std::async(std::launch::async, [&] { engine.reset(); });
    CHECK(destroyed.wait_for(kShortWait) == std::future_status::timeout);
    page.open();
    REQUIRE(destroyed.wait_for(kLongWait) == std::future_status::ready);
    CHECK(ticket->done());
  }

  TEST_CASE("many host threads use one engine") {
    const auto arena = open_arena(8 << 20);
    const auto device = make_cpu_device(3);
    SnapshotEngine engine(device);
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (std::uint64_t caller = 0; caller < 6; ++caller) {
      callers.emplace_back([&, caller] {
        Bytes memory(40000);
        const CopyPlan plan = plan_of(memory);
        for (std::uint64_t round = 0; round < 50; ++round) {
          const Bytes saved = random_bytes(memory.size(), caller * 1000 + round);
          std::copy(saved.begin(), saved.end(), memory.begin());
          const auto extent = arena->allocate(plan.host_bytes());
          const auto ticket = engine.save(plan, extent, 0, kCaller, round % 2 == 0);
          engine.fence(kCaller);
          wrong += ticket->wait(kLongWait) ? 0 : 1;
          std::fill(memory.begin(), memory.end(), std::byte{0});
          wrong += engine.restore(plan, extent, 0, kCaller)->wait(kLongWait) && memory == saved ? 0 : 1;
          wrong += engine.in_flight() < 100 ? 0 : 1;
        }
      });
    }
    for (std::thread& caller : callers) {
      caller.join();
    }
    CHECK(wrong == 0);
    CHECK(engine.in_flight() == 0);
    CHECK(arena->stats().extents == 0);
  }
}

TEST_SUITE("engine calls") {
  TEST_CASE("a save with and without a caller that waits") {
    Bench bench;
    static_cast<void>(bench.save(true));
    CHECK(bench.device->take_calls() ==
          Calls{"save after caller 42", "save copies 3", "save records", "caller 42 after save1"});
    static_cast<void>(bench.save(false));
    CHECK(bench.device->take_calls() == Calls{"save after caller 42", "save copies 3", "save records"});
  }

  TEST_CASE("each direction waits for the newest of the other that is in flight") {
    Bench bench;
    static_cast<void>(bench.save());
    static_cast<void>(bench.save());
    bench.device->take_calls().clear();
    static_cast<void>(bench.restore());
    CHECK(bench.device->take_calls() == Calls{"restore after caller 42", "restore after save2", "restore copies 3",
                                              "restore records", "caller 42 after restore3"});
    static_cast<void>(bench.save(false));
    CHECK(bench.device->take_calls() ==
          Calls{"save after caller 42", "save after restore3", "save copies 3", "save records"});
    for (const auto& event : bench.device->recorded) {
      event->reach();
    }
    static_cast<void>(bench.restore());
    CHECK(bench.device->take_calls() ==
          Calls{"restore after caller 42", "restore copies 3", "restore records", "caller 42 after restore5"});
  }

  TEST_CASE("a fence makes the caller wait for the newest save in flight") {
    Bench bench;
    bench.engine.fence(7);
    CHECK(bench.device->take_calls().empty());
    static_cast<void>(bench.save(false));
    static_cast<void>(bench.save(false));
    bench.device->take_calls().clear();
    bench.engine.fence(7);
    CHECK(bench.device->take_calls() == Calls{"caller 7 after save2"});
    bench.device->recorded[0]->reach();
    bench.engine.fence(7);
    CHECK(bench.device->take_calls() == Calls{"caller 7 after save2"});
    bench.device->recorded[1]->reach();
    bench.engine.fence(7);
    CHECK(bench.device->take_calls().empty());
  }

  TEST_CASE("copies are in flight until their events are reached, in whatever order") {
    Bench bench;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int copy = 0; copy < 4; ++copy) {
      tickets.push_back(copy % 2 == 0 ? bench.save() : bench.restore());
      CHECK(bench.engine.in_flight() == tickets.size());
    }
    std::size_t left = 4;
    for (const std::size_t index : {2U, 0U, 3U, 1U}) {
      CHECK_FALSE(tickets[index]->done());
      CHECK_FALSE(tickets[index]->wait(0ns));
      bench.device->recorded[index]->reach();
      CHECK(tickets[index]->done());
      CHECK(tickets[index]->wait(0ns));
      CHECK(tickets[index]->error() == std::nullopt);
      CHECK(bench.engine.in_flight() == --left);
      CHECK(bench.arena->stats().extents == left);
    }
  }

  TEST_CASE("a later call reaps what has ended meanwhile") {
    Bench bench;
    static_cast<void>(bench.save());
    bench.device->recorded[0]->reach();
    CHECK(bench.arena->stats().extents == 1);  // nobody has looked
    static_cast<void>(bench.save());
    CHECK(bench.arena->stats().extents == 1);
    CHECK(bench.engine.in_flight() == 1);
  }

  TEST_CASE("a ticket lets go of the memory once the copy is done") {
    Bench bench;
    const auto by_asking = bench.save();
    const auto by_waiting = bench.save();
    const auto by_error = bench.save();
    CHECK(bench.arena->stats().extents == 3);
    for (const auto& event : bench.device->recorded) {
      event->reach();
    }
    CHECK(by_asking->done());
    CHECK(bench.arena->stats().extents == 2);
    CHECK(by_waiting->wait(0ns));
    CHECK(bench.arena->stats().extents == 1);
    CHECK(by_error->error() == std::nullopt);
    CHECK(bench.arena->stats().extents == 0);
    CHECK(by_asking->bytes() == bench.plan.bytes());
    CHECK(bench.engine.in_flight() == 0);
    for (const auto& event : bench.device->recorded) {
      CHECK(event.use_count() == 1);  // nobody else holds it
    }
  }

  TEST_CASE("an extent that is too small is refused before anything happens") {
    Bench bench;
    const auto extent = bench.arena->allocate(bench.plan.host_bytes());
    const std::size_t room = extent->bytes() - bench.plan.host_bytes();
    constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();
    for (const std::size_t base : {room + 1, extent->bytes(), huge - 100, huge}) {
      CAPTURE(base);
      CHECK_THROWS_AS(bench.engine.save(bench.plan, extent, base, kCaller, true), std::out_of_range);
      CHECK_THROWS_AS(bench.engine.restore(bench.plan, extent, base, kCaller), std::out_of_range);
    }
    CHECK_THROWS_AS(bench.engine.save(bench.plan, bench.arena->allocate(0), 0, kCaller, true), std::out_of_range);
    CHECK(bench.device->calls.empty());
    CHECK(bench.engine.in_flight() == 0);
    CHECK_NOTHROW(static_cast<void>(bench.engine.save(bench.plan, extent, room, kCaller, true)));
  }
}

TEST_SUITE("engine failures") {
  TEST_CASE("a device that fails at any call") {
    for (const bool saving : {true, false}) {
      const std::size_t calls = 5;  // with the order after a copy of the other direction
      for (std::size_t fail_at = 1; fail_at <= calls; ++fail_at) {
        CAPTURE(saving);
        CAPTURE(fail_at);
        Bench bench;
        const auto earlier = saving ? bench.restore() : bench.save();
        bench.device->take_calls().clear();
        bench.device->fail_at = fail_at;
        CHECK_THROWS_AS(static_cast<void>(saving ? bench.save() : bench.restore()), CopyError);
        CHECK(bench.device->calls.size() == fail_at + 1);
        CHECK(bench.device->calls.back() == "drain");
        CHECK(bench.arena->stats().extents == 1);
        CHECK(bench.engine.in_flight() == 1);
        CHECK_FALSE(earlier->done());

        bench.device->fail_at = 0;
        for (const auto& event : bench.device->recorded) {
          event->reach();
        }
        CHECK(earlier->wait(0ns));
        const auto later = saving ? bench.save() : bench.restore();
        bench.device->recorded.back()->reach();
        CHECK(later->wait(0ns));
        CHECK(bench.engine.in_flight() == 0);
        CHECK(bench.arena->stats().extents == 0);
      }
    }
  }

  TEST_CASE("a copy that fails in flight") {
    Bench bench;
    const auto failing = bench.save();
    const auto fine = bench.save();
    bench.device->recorded[0]->fail();
    CHECK(failing->done());
    CHECK(failing->error() == "the work before save1 failed");
    for (int times = 0; times < 2; ++times) {
      CHECK_THROWS_WITH_AS(static_cast<void>(failing->wait(0ns)), "the work before save1 failed", CopyError);
    }
    CHECK(bench.arena->stats().extents == 1);
    CHECK_FALSE(fine->done());
    CHECK(fine->error() == std::nullopt);
    CHECK(bench.engine.in_flight() == 1);
    bench.device->recorded[1]->reach();
    CHECK(fine->wait(0ns));
    CHECK(fine->error() == std::nullopt);
  }

  TEST_CASE("a failure that only a wait sees") {
    Bench bench;
    const auto ticket = bench.save();
    auto waiting = std::async(std::launch::async, [&] {
      while (!ticket->wait(1ms)) {
      }
    });
    bench.device->recorded[0]->fail();
    CHECK_THROWS_AS(waiting.get(), CopyError);
    CHECK(bench.arena->stats().extents == 0);
  }

  TEST_CASE("later copies do not wait for one that has failed") {
    Bench bench;
    static_cast<void>(bench.save());
    bench.device->recorded[0]->fail();
    bench.device->take_calls().clear();
    const auto restored = bench.restore();
    CHECK(bench.device->take_calls() ==
          Calls{"restore after caller 42", "restore copies 3", "restore records", "caller 42 after restore2"});
    bench.device->recorded[1]->reach();
    CHECK(restored->wait(0ns));
    CHECK(bench.arena->stats().extents == 0);
  }
}
