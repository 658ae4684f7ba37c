"""The service on one process through the CUDA backend: what it copies, what it leaves behind, what it refuses."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

from shardsnap import DeviceUnavailableError, PinningError, SnapshotService, UnknownVersionError
from tests.emulator.processes import NOTHING_LIVES, Emulated, emulator_counts, live_counts
from tests.reference import kept, named_tensors, scramble

DRIVERS = (12000, 12080, 13000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


class Mixed(nn.Module):
    """Hundreds of tensors from no element to a few megabytes, neighbours and strangers, of many dtypes."""

    def __init__(self, count: int = 300) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(count)
        for index in range(count):
            largest = 10 ** int(torch.randint(0, 6, (), generator=generator))
            size = int(torch.randint(0, largest + 1, (), generator=generator))
            tensor = torch.zeros(size, dtype=DTYPES[index % len(DTYPES)])
            if tensor.is_floating_point():
                self.register_parameter(f"p{index}", nn.Parameter(tensor))
            else:
                self.register_buffer(f"b{index}", tensor)
        joined = torch.zeros(1000)
        for index in range(0, 1000, 10):
            self.register_buffer(f"joined{index}", joined[index : index + 10])
        scramble(self)


def round_trips() -> dict[str, int]:
    """Several versions, bit for bit, in any order; what the driver counted meanwhile."""
    before = emulator_counts_or_zero()
    model = Mixed()
    with SnapshotService(model, snapshots=4) as service:
        assert service.stats().devices[0].startswith("cuda:0 (Emulated CUDA device, driver 1")
        saved = {}
        for version in range(3):
            scramble(model)
            saved[version] = kept(model)
            ticket = service.save(version)
            ticket.wait(60)
            assert ticket.nbytes == sum(tensor.nbytes for tensor in named_tensors(model).values())
        for version in (1, 2, 0, 0, 2):
            scramble(model)
            assert kept(model) != saved[version]
            report = service.restore(version)
            assert kept(model) == saved[version]
            assert set(report.restored) == set(saved[version])

        scramble(model)
        newer = kept(model)
        service.save(1)
        scramble(model)
        service.restore(1)
        assert kept(model) == newer
        service.restore(0)
        assert kept(model) == saved[0]

        service.drop(1)
        with pytest.raises(UnknownVersionError):
            service.restore(1)
        assert service.versions() == (0, 2)
        assert kept(model) == saved[0]
        service.save("after the drop")
    gc.collect()
    assert live_counts() == NOTHING_LIVES
    after = emulator_counts()
    return {name: after[name] - before.get(name, 0) for name in after}


def emulator_counts_or_zero() -> dict[str, int]:
    """Before the first service the driver is not loaded."""
    try:
        return emulator_counts()
    except OSError:
        return {}


@pytest.mark.parametrize("driver", DRIVERS)
def test_round_trips(emulated: Emulated, driver: int) -> None:
    counts = emulated(round_trips, driver=driver)
    if driver >= 12080:
        assert counts["batch_calls"] > 0
        assert counts["batch_copies"] > 20 * counts["batch_calls"]
        assert counts["single_copies"] == 0
    else:
        assert counts["batch_calls"] == 0
        assert counts["single_copies"] > 100


def trains_on() -> bool:
    """A model in training, saved before each step and put back: a twin that was left alone has the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    in_flight = False
    with SnapshotService(model, snapshots=2) as service:
        service.guard(optimizer)
        for index in range(60):
            before = kept(model)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            ticket = service.save("before", fence="optimizer")
            in_flight |= not ticket.done()
            optimizer.step()
            assert ticket.done(), "the step did not wait for the save"
            after = kept(model)
            assert all(after[name] != before[name] for name in before)
            service.restore("before", wait=bool(index % 2))
            assert kept(model) == before
            optimizer.step()
    return in_flight


@pytest.mark.parametrize("driver", DRIVERS)
def test_guarded_steps(emulated: Emulated, driver: int) -> None:
    assert emulated(trains_on, driver=driver), "no save was ever in flight, so nothing was guarded"


def pinned_bytes(pin: Any) -> tuple[int, int, str, int]:
    """The arena's pinned and mapped bytes, why not, and the registrations while the service lives."""
    model = nn.Linear(300, 300)
    with SnapshotService(model, snapshots=2, pin=pin) as service:
        registrations = emulator_counts()["registrations"]
        saved = kept(model)
        service.save(0)
        scramble(model)
        service.restore(0)
        assert kept(model) == saved
        arena = service.stats().arena
    assert live_counts() == NOTHING_LIVES
    return arena.pinned, arena.mapped, arena.pin_failure, registrations


@pytest.mark.parametrize("pin", ["require", "prefer"])
def test_memory_is_pinned(emulated: Emulated, pin: str) -> None:
    pinned, mapped, failure, registrations = emulated(pinned_bytes, pin)
    assert pinned == mapped > 2 * 300 * 301 * 4
    assert failure == ""
    assert registrations == 1


def test_memory_is_not_pinned_when_it_must_not_be(emulated: Emulated) -> None:
    pinned, mapped, failure, registrations = emulated(pinned_bytes, "never")
    assert (pinned, failure, registrations) == (0, "", 0)
    assert mapped > 0


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


def pinned_bytes_and_warnings(pin: str) -> tuple[tuple[int, int, str, int], list[str]]:
    records = Records()
    logging.getLogger("shardsnap").addHandler(records)
    try:
        return pinned_bytes(pin), records.warnings
    finally:
        logging.getLogger("shardsnap").removeHandler(records)


OUT_OF_MEMORY = 2


def test_refused_pinning_is_a_warning(emulated: Emulated) -> None:
    (pinned, mapped, failure, _), warnings = emulated(
        pinned_bytes_and_warnings, "prefer", register_result=OUT_OF_MEMORY
    )
    assert pinned == 0
    assert mapped > 0
    assert "CUDA_ERROR_OUT_OF_MEMORY" in failure
    assert len(warnings) == 1
    assert "pageable" in warnings[0]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in warnings[0]
    (_, _, _, registrations), warnings = emulated(pinned_bytes_and_warnings, "prefer")
    assert (registrations, warnings) == (1, [])


def construction_error(kind: str, **options: Any) -> tuple[str, dict[str, int]]:
    """The message of the error of that type, and what it leaves behind in the driver."""
    types = {"pinning": PinningError, "device": DeviceUnavailableError}
    with pytest.raises(types[kind]) as caught:
        SnapshotService(nn.Linear(3, 3), **options)
    message = str(caught.value)
    del caught
    gc.collect()
    try:
        return message, live_counts()
    except OSError:
        return message, dict(NOTHING_LIVES)  # the driver is not even loaded


def required_pinning_error() -> tuple[str, dict[str, int]]:
    return construction_error("pinning", pin="require")


def device_error() -> tuple[str, dict[str, int]]:
    return construction_error("device")


def test_refused_pinning_is_an_error_where_it_is_required(emulated: Emulated) -> None:
    message, left = emulated(required_pinning_error, register_result=OUT_OF_MEMORY)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in message
    assert "RLIMIT_MEMLOCK" in message
    assert left == NOTHING_LIVES


def test_a_driver_without_devices_is_named(emulated: Emulated) -> None:
    message, left = emulated(device_error, init_result=100)
    assert "CUDA_ERROR_NO_DEVICE" in message
    assert "CUDA_VISIBLE_DEVICES" in message
    assert left == NOTHING_LIVES


def test_a_driver_that_is_too_old_is_named(emulated: Emulated) -> None:
    message, _ = emulated(device_error, driver=10000)
    assert "update the NVIDIA driver" in message


def test_a_missing_driver_library_is_named(emulated: Emulated) -> None:
    message, _ = emulated(device_error, library="/nowhere/libcuda.so.1")
    assert "/nowhere/libcuda.so.1: cannot open shared object file: No such file or directory" in message


def closed_while_copying() -> None:
    """close(), and a service that is only let go of, wait for what is in flight and give everything back."""
    model = Mixed(100)
    for closing in (True, False, True, False):
        service = SnapshotService(model, snapshots=3)
        for version in range(3):
            service.save(version)
        service.restore(1, wait=False)
        alive = live_counts()
        assert alive["context_references"] >= 1
        assert alive["streams"] == 2
        assert alive["registrations"] == 1
        if closing:
            service.close()
        del service
        gc.collect()
        assert live_counts() == NOTHING_LIVES


@pytest.mark.parametrize("driver", DRIVERS)
def test_nothing_is_left_behind(emulated: Emulated, driver: int) -> None:
    emulated(closed_while_copying, driver=driver)


def kept_objects() -> None:
    """A ticket and a report that outlive the service keep nothing of the driver once it is closed."""
    model = nn.Linear(3, 3)
    service = SnapshotService(model, snapshots=1)
    ticket = service.save(0)
    report = service.restore(0)
    service.close()
    assert ticket.done()
    assert ticket.error is None
    assert report.restored == ("weight", "bias")
    assert live_counts()["registrations"] == 0
    del ticket, service
    gc.collect()
    assert live_counts() == NOTHING_LIVES


def test_tickets_outlive_the_service(emulated: Emulated) -> None:
    emulated(kept_objects)
