#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copies.hpp"
#include "device/cpu_device.hpp"
#include "device/streaming_copy.hpp"
#include "errors.hpp"
#include "held_page.hpp"
#include "sanitizers.hpp"

namespace {

using namespace std::chrono_literals;
using shardsnap::CopyDevice;
using shardsnap::CopyError;
using shardsnap::CopyRange;
using shardsnap::CopyRanges;
using shardsnap::Direction;
using shardsnap::Event;
using shardsnap::EventPtr;
using shardsnap::make_cpu_device;
using shardsnap::PinningError;

using Clock = std::chrono::steady_clock;

constexpr auto kLongWait = 20s;
// Long enough for work that is wrongly not held back to show up.
constexpr auto kShortWait = 20ms;
constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr auto kUntouched = std::byte{0xA5};

void finish(CopyDevice& device, Direction direction) { REQUIRE(device.record(direction)->wait(kLongWait)); }

Direction other(Direction direction) {
  return direction == Direction::kDeviceToHost ? Direction::kHostToDevice : Direction::kDeviceToHost;
}

// Cuts [0, bytes) into ranges of every size, gaps between some and empty ones among them, in random order.
std::vector<CopyRange> random_ranges(const Bytes& device, std::size_t largest, std::mt19937_64& engine) {
  std::vector<CopyRange> ranges;
  for (std::size_t at = 0; at < device.size();) {
    const std::size_t bytes = std::min(engine() % (largest + 1), device.size() - at);
    ranges.push_back({address_of(device) + at, at, bytes});
    at += bytes + (engine() % 2 == 0 ? 0 : engine() % 100);
  }
  std::shuffle(ranges.begin(), ranges.end(), engine);
  return ranges;
}

// What a copy of these ranges, which agree with offsets into `from`, makes of memory that holds kUntouched.
Bytes expected_copy(const Bytes& from, const std::vector<CopyRange>& ranges) {
  Bytes expected(from.size(), kUntouched);
  for (const CopyRange& range : ranges) {
    std::memcpy(expected.data() + range.host_offset, from.data() + range.host_offset, range.bytes);
  }
  return expected;
}

// True where the action throws a CopyError that speaks of the fork. For children, which must not use doctest.
bool refused(const std::function<void()>& action) {
  try {
    action();
  } catch (const CopyError& error) {
    return std::string(error.what()).find("fork") != std::string::npos;
  }
  return false;
}

// Runs `body` in a fork and gives what it returned, or 1000 + the signal that ended it; a child that hangs is ended.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGALRM, SIG_DFL);
    alarm(20);
    _exit(body());
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace

TEST_SUITE("cpu device") {
  TEST_CASE("copies are exact in both directions, and touch nothing else") {
    for (const unsigned threads : {1U, 2U, 16U}) {
      for (const auto& sizes : std::vector<std::pair<std::size_t, std::size_t>>{
               {3000, 50}, {kMiB, 5000}, {9 * kMiB, 40000}, {20 * kMiB, 6 * kMiB}}) {
        const std::size_t total = sizes.first;
        const std::size_t largest = sizes.second;
        CAPTURE(threads);
        CAPTURE(total);
        std::mt19937_64 engine(total + threads);
        const Bytes weights = random_bytes(total, total);
        Bytes host(total, kUntouched);
        const std::vector<CopyRange> ranges = random_ranges(weights, largest, engine);
        const auto device = make_cpu_device(threads);
        device->submit(Direction::kDeviceToHost, ranges_of(ranges), host.data());
        finish(*device, Direction::kDeviceToHost);
        CHECK((host == expected_copy(weights, ranges)));

        Bytes restored(total, kUntouched);
        std::vector<CopyRange> back = ranges;
        for (CopyRange& range : back) {
          range.device += address_of(restored) - address_of(weights);
        }
        device->submit(Direction::kHostToDevice, ranges_of(back), host.data());
        finish(*device, Direction::kHostToDevice);
        CHECK((restored == expected_copy(weights, ranges)));
      }
    }
  }

  TEST_CASE("no range, and ranges without bytes") {
    const auto device = make_cpu_device(2);
    Bytes host(10, kUntouched);
    device->submit(Direction::kDeviceToHost, ranges_of({}), host.data());
    CHECK(device->record(Direction::kDeviceToHost)->done());
    device->submit(Direction::kDeviceToHost, ranges_of({{address_of(host), 0, 0}, {address_of(host), 5, 0}}),
                   host.data());
    finish(*device, Direction::kDeviceToHost);
    CHECK(host == Bytes(10, kUntouched));
  }

  TEST_CASE("one stream is first in, first out") {
    for (const unsigned threads : {1U, 2U, 16U}) {
      CAPTURE(threads);
      constexpr std::size_t length = 200000;
      const Bytes old_weights = random_bytes(length, 1);
      const Bytes new_weights = random_bytes(length, 2);
      Bytes host(length);
      const auto device = make_cpu_device(threads);
      for (int round = 0; round < 300; ++round) {
        device->submit(Direction::kDeviceToHost, whole(old_weights), host.data());
        device->submit(Direction::kDeviceToHost, whole(new_weights), host.data());
        finish(*device, Direction::kDeviceToHost);
        REQUIRE(host == new_weights);
      }
    }
  }

  TEST_CASE("an event waits for all that is before it, and for nothing after it") {
    Bytes host(HeldPage::kBytes);
    Bytes memory(100);
    const auto device = make_cpu_device(2);
    HeldPage page;
    page.fill(std::byte{1});
    device->submit(Direction::kDeviceToHost, whole(memory), host.data());
    const EventPtr before = device->record(Direction::kDeviceToHost);
    device->submit(Direction::kDeviceToHost, whole(page.data(), HeldPage::kBytes), host.data());
    const EventPtr after = device->record(Direction::kDeviceToHost);
    device->submit(Direction::kDeviceToHost, whole(memory), host.data());
    const EventPtr last = device->record(Direction::kDeviceToHost);
    CHECK(before->wait(kLongWait));
    page.wait_until_touched();
    std::this_thread::sleep_for(kShortWait);
    CHECK_FALSE(after->done());
    CHECK_FALSE(last->done());
    page.open();
    CHECK(after->wait(kLongWait));
    CHECK(last->wait(kLongWait));
    CHECK(std::all_of(host.begin() + 100, host.end(), [](std::byte byte) { return byte == std::byte{1}; }));
  }

  TEST_CASE("the directions do not wait for each other") {
    Bytes host(HeldPage::kBytes);
    const Bytes from = random_bytes(5 * kMiB, 1);
    Bytes to(from.size());
    const auto device = make_cpu_device(2);
    HeldPage page;
    device->submit(Direction::kDeviceToHost, whole(page.data(), HeldPage::kBytes), host.data());
    const EventPtr held = device->record(Direction::kDeviceToHost);
    page.wait_until_touched();
    device->submit(Direction::kHostToDevice, whole(to), const_cast<std::byte*>(from.data()));
    finish(*device, Direction::kHostToDevice);
    CHECK((to == from));
    CHECK_FALSE(held->done());
  }

  TEST_CASE("a stream that is ordered after an event waits for it") {
    Bytes host(HeldPage::kBytes);
    Bytes weights(HeldPage::kBytes);
    const auto device = make_cpu_device(4);
    HeldPage page;
    page.fill(std::byte{7});
    device->submit(Direction::kDeviceToHost, whole(page.data(), HeldPage::kBytes), host.data());
    const EventPtr saved = device->record(Direction::kDeviceToHost);
    device->order_after(Direction::kHostToDevice, saved);
    device->submit(Direction::kHostToDevice, whole(weights), host.data());
    const EventPtr restored = device->record(Direction::kHostToDevice);
    page.wait_until_touched();
    CHECK_FALSE(restored->wait(kShortWait));
    page.open();
    CHECK(restored->wait(kLongWait));
    CHECK(saved->done());
    CHECK(weights == Bytes(HeldPage::kBytes, std::byte{7}));
  }

  TEST_CASE("a chain of copies across the streams, each of which must see the one before") {
    for (const unsigned threads : {1U, 2U, 16U}) {
      CAPTURE(threads);
      constexpr std::size_t steps = 400;
      constexpr std::size_t length = 30000;
      const auto device = make_cpu_device(threads);
      for (std::uint64_t round = 0; round < 5; ++round) {
        std::vector<Bytes> links(steps + 1, Bytes(length));
        links[0] = random_bytes(length, round);
        Direction direction = Direction::kDeviceToHost;
        for (std::size_t step = 0; step < steps; ++step) {
          const bool to_host = direction == Direction::kDeviceToHost;
          Bytes& device_side = links[to_host ? step : step + 1];
          Bytes& host_side = links[to_host ? step + 1 : step];
          std::vector<CopyRange> ranges;
          for (std::size_t at = 0; at < length; at += 1000) {
            ranges.push_back({address_of(device_side) + at, at, 1000});
          }
          device->submit(direction, ranges_of(std::move(ranges)), host_side.data());
          device->order_after(other(direction), device->record(direction));
          direction = other(direction);
        }
        finish(*device, direction);
        REQUIRE((links[steps] == links[0]));
      }
    }
  }

  TEST_CASE("events of others are refused") {
    class ForeignEvent final : public Event {
     public:
      [[nodiscard]] bool done() const override { return true; }
      [[nodiscard]] bool wait(std::chrono::nanoseconds /*timeout*/) const override { return true; }
    };
    const auto device = make_cpu_device(1);
    const auto second = make_cpu_device(1);
    CHECK_THROWS_AS(device->order_after(Direction::kDeviceToHost, std::make_shared<ForeignEvent>()), CopyError);
    CHECK_THROWS_AS(device->order_after(Direction::kDeviceToHost, second->record(Direction::kDeviceToHost)), CopyError);
    finish(*device, Direction::kDeviceToHost);
  }

  TEST_CASE("a wait ends when its time is over") {
    Bytes host(HeldPage::kBytes);
    const auto device = make_cpu_device(2);
    HeldPage page;
    device->submit(Direction::kDeviceToHost, whole(page.data(), HeldPage::kBytes), host.data());
    const EventPtr held = device->record(Direction::kDeviceToHost);
    for (const auto timeout : {-1ns, 0ns}) {
      CHECK_FALSE(held->wait(timeout));
    }
    const auto start = Clock::now();
    CHECK_FALSE(held->wait(50ms));
    CHECK(Clock::now() - start >= 50ms);
    CHECK(Clock::now() - start < kLongWait);

    // The longest time there is must not turn into none.
    auto longest = std::async(std::launch::async, [&] { return held->wait(std::chrono::nanoseconds::max()); });
    CHECK(longest.wait_for(kShortWait) == std::future_status::timeout);
    page.open();
    REQUIRE(longest.wait_for(kLongWait) == std::future_status::ready);
    CHECK(longest.get());
    CHECK(held->wait(0ns));
  }

  TEST_CASE("drain waits for both streams") {
    for (const Direction direction : {Direction::kDeviceToHost, Direction::kHostToDevice}) {
      Bytes host(HeldPage::kBytes);
      const auto device = make_cpu_device(2);
      HeldPage page;
      device->drain();
      device->submit(direction, whole(page.data(), HeldPage::kBytes), host.data());
      page.wait_until_touched();
      auto drained = std::async(std::launch::async, [&] { device->drain(); });
      CHECK(drained.wait_for(kShortWait) == std::future_status::timeout);
      page.open();
      REQUIRE(drained.wait_for(kLongWait) == std::future_status::ready);
      CHECK(device->record(direction)->done());
    }
  }

  TEST_CASE("a device waits for its copies when it is destroyed, and its events outlive it") {
    Bytes host(HeldPage::kBytes);
    auto device = make_cpu_device(2);
    HeldPage page;
    device->submit(Direction::kDeviceToHost, whole(page.data(), HeldPage::kBytes), host.data());
    const Bytes weights(HeldPage::kBytes, std::byte{3});
    device->submit(Direction::kDeviceToHost, whole(weights), host.data());  // not even begun by then
    const EventPtr event = device->record(Direction::kDeviceToHost);
    page.wait_until_touched();
    auto destroyed = std::async(std::launch::async, [&] { device.reset(); });
    CHECK(destroyed.wait_for(kShortWait) == std::future_status::timeout);
    CHECK_FALSE(event->done());
    page.open();
    REQUIRE(destroyed.wait_for(kLongWait) == std::future_status::ready);
    CHECK(event->done());
    CHECK(event->wait(0ns));
    CHECK(host == weights);
  }

  TEST_CASE("the ranges may be let go of after submit") {
    const Bytes weights = random_bytes(20000, 1);
    Bytes host(HeldPage::kBytes + weights.size());
    const auto device = make_cpu_device(1);
    HeldPage page;
    {
      std::vector<CopyRange> ranges{{address_of(page.data()), 0, HeldPage::kBytes}};
      for (std::size_t at = 0; at < weights.size(); at += 10) {
        ranges.push_back({address_of(weights) + at, HeldPage::kBytes + at, 10});
      }
      device->submit(Direction::kDeviceToHost, ranges_of(std::move(ranges)), host.data());
    }
    page.wait_until_touched();
    page.open();
    finish(*device, Direction::kDeviceToHost);
    CHECK(std::equal(weights.begin(), weights.end(), host.begin() + HeldPage::kBytes));
  }

  TEST_CASE("many host threads use one device") {
    for (const unsigned threads : {1U, 4U}) {
      CAPTURE(threads);
      const auto device = make_cpu_device(threads);
      std::atomic<int> wrong{0};
      std::vector<std::thread> callers;
      for (std::uint64_t caller = 0; caller < 8; ++caller) {
        callers.emplace_back([&, caller] {
          std::mt19937_64 engine(caller);
          Bytes host(60000);
          for (int round = 0; round < 60; ++round) {
            const Bytes weights = random_bytes(1 + engine() % host.size(), engine());
            Bytes restored(weights.size());
            device->submit(Direction::kDeviceToHost, whole(weights), host.data());
            device->order_after(Direction::kHostToDevice, device->record(Direction::kDeviceToHost));
            device->submit(Direction::kHostToDevice, whole(restored), host.data());
            const bool done = device->record(Direction::kHostToDevice)->wait(kLongWait);
            wrong += done && restored == weights ? 0 : 1;
            if (round % 20 == 0) {
              device->drain();
            }
          }
        });
      }
      for (std::thread& caller : callers) {
        caller.join();
      }
      CHECK(wrong == 0);
    }
  }

  TEST_CASE("what it says of itself") {
    const auto device = make_cpu_device(3);
    CHECK(device->describe() == "cpu (3 copy threads, " + std::string(shardsnap::streaming_copy_isa()) + ")");
    CHECK(make_cpu_device(0)->describe().find("cpu (0 ") == std::string::npos);
    CHECK(device->numa_node() == -1);
    CHECK_FALSE(device->can_register());
    Bytes memory(1);
    CHECK_THROWS_AS(device->register_host(memory.data(), memory.size()), PinningError);
    device->unregister_host(memory.data());
    device->order_after_caller(Direction::kDeviceToHost, 5);
    device->order_caller_after(5, device->record(Direction::kDeviceToHost));
  }
}

TEST_SUITE("cpu device and fork") {
  TEST_CASE("a child is refused") {
    auto device = make_cpu_device(2);
    EventPtr event = device->record(Direction::kDeviceToHost);
    REQUIRE(event->done());
    Bytes memory(100);
    const int result = in_child([&] {
      const CopyRanges ranges = whole(memory);
      const bool all_refused = refused([&] { device->submit(Direction::kDeviceToHost, ranges, memory.data()); }) &&
                               refused([&] { static_cast<void>(device->record(Direction::kHostToDevice)); }) &&
                               refused([&] { device->order_after(Direction::kHostToDevice, event); });
      const bool past_known = event->done() && event->wait(1h);
      device->drain();
      device.reset();
      event.reset();
      return all_refused && past_known ? 0 : 1;
    });
    CHECK(result == 0);
    CHECK(event->done());
    finish(*device, Direction::kDeviceToHost);
  }

  // ThreadSanitizer itself takes a thread that lies where one of the parent's lay for that one.
  TEST_CASE("a child goes on with a device of its own" * doctest::skip(kThreadSanitizer)) {
    auto device = make_cpu_device(2);
    const Bytes weights = random_bytes(100000, 1);
    const int result = in_child([&] {
      auto own = make_cpu_device(4);  // its threads may lie where the parent's lay
      device.reset();
      Bytes host(weights.size());
      own->submit(Direction::kDeviceToHost, whole(weights), host.data());
      const bool copied = own->record(Direction::kDeviceToHost)->wait(kLongWait) && host == weights;
      own.reset();
      return copied ? 0 : 1;
    });
    CHECK(result == 0);
  }

  TEST_CASE("a fork in the middle of copies") {
    Bytes host(HeldPage::kBytes);
    auto device = make_cpu_device(2);
    HeldPage page;
    device->submit(Direction::kDeviceToHost, whole(page.data(), HeldPage::kBytes), host.data());
    EventPtr event = device->record(Direction::kDeviceToHost);
    page.wait_until_touched();
    const int result = in_child([&] {
      device->drain();
      const bool event_refused = refused([&] { static_cast<void>(event->done()); });
      device.reset();
      return event_refused && refused([&] { static_cast<void>(event->wait(1h)); }) ? 0 : 1;
    });
    CHECK(result == 0);
    page.open();
    CHECK(event->wait(kLongWait));
  }

  TEST_CASE("a fork while the workers hold the lock") {
    auto device = make_cpu_device(4);
    const Bytes weights = random_bytes(4000, 1);
    Bytes host(weights.size());
    std::atomic<bool> stop{false};
    std::thread busy([&] {
      while (!stop) {
        for (int copy = 0; copy < 50; ++copy) {
          device->submit(Direction::kDeviceToHost, whole(weights), host.data());
        }
        device->drain();
      }
    });
    int failures = 0;
    for (int round = 0; round < 60; ++round) {
      EventPtr event = device->record(Direction::kDeviceToHost);
      const int result = in_child([&] {
        try {
          static_cast<void>(event->done());
        } catch (const CopyError&) {  // it was not done at the fork
        }
        device->drain();
        device.reset();
        event.reset();
        return 0;
      });
      failures += result == 0 ? 0 : 1;
    }
    stop = true;
    busy.join();
    CHECK(failures == 0);
  }
}
