"""What a service takes, on the device and on the host, and that it gives all of it back."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.memory import resident_bytes
from shardsnap import SnapshotService
from tests.gpu.device import DEVICE, ON_GPU, SECONDS, Marked, gpu, needs_streams, synchronize

pytestmark = gpu

REPOSITORY = Path(__file__).resolve().parents[2]
SLACK = 64 << 20  # other processes on the device, and what allocators round up


def is_pinned(address: int) -> bool:
    """What the driver says of host memory, which is not touched."""
    return torch.frombuffer((ctypes.c_uint8 * 1).from_address(address), dtype=torch.uint8).is_pinned()


@needs_streams
def test_copies_take_no_device_memory() -> None:
    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with SnapshotService(model, snapshots=3) as service:
        service.guard(optimizer)
        service.save("v")
        service.restore("v")
        synchronize()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        allocated, reserved = torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)
        for index in range(4):
            service.save("v", fence="optimizer" if index % 2 else "stream")
            service.restore("v", wait=bool(index % 2))
        synchronize()
        assert torch.cuda.max_memory_allocated(DEVICE) == allocated
        assert torch.cuda.memory_reserved(DEVICE) == reserved


@needs_streams
def test_a_closed_service_unpins() -> None:
    model = Marked(parts=1)
    service = SnapshotService(model, snapshots=2, pin="require")
    service.save("v").wait(SECONDS)
    address = service._held["v"].newest.extent.address  # type: ignore[union-attr]
    assert is_pinned(address)
    service.close()
    assert not is_pinned(address)


@pytest.mark.parametrize("closing", [True, False], ids=["closed", "let go of"])
def test_nothing_is_left_behind(closing: bool) -> None:
    """Services that end with copies in flight, again and again: neither the host nor the device fills up."""
    model = Marked()

    def use() -> None:
        service = SnapshotService(model, snapshots=3)
        for version in range(3):
            service.save(version)
        service.restore(1, wait=False)
        if closing:
            service.close()
        del service
        gc.collect()

    use()
    synchronize()
    resident = resident_bytes()
    free = torch.cuda.mem_get_info(DEVICE)[0] if ON_GPU else 0
    for _ in range(6):
        use()
    synchronize()
    size = sum(weight.nbytes for weight in model.weights)
    assert resident_bytes() - resident < size, "the host memory of six services is more than that of one"
    if ON_GPU:
        assert free - torch.cuda.mem_get_info(DEVICE)[0] < SLACK


def test_a_ticket_outlives_its_service() -> None:
    model = Marked(parts=1)
    service = SnapshotService(model, snapshots=1)
    ticket = service.save("v")
    service.close()
    assert ticket.done()
    assert ticket.error is None


def test_weights_may_be_let_go_of_while_a_save_reads_them() -> None:
    """Memory that torch gives to the next tensor must not reach the snapshot."""
    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with SnapshotService(model, snapshots=3) as service:
        service.guard(optimizer)
        for index in range(1, 5):
            model.mark(index)
            service.save("v", fence="optimizer" if index % 2 else "stream")
            for position in range(len(model.weights)):
                model.weights[position] = torch.nn.Parameter(torch.full_like(model.weights[position], -1.0))
            service.restore("v")
            assert model.values() == {index}


EXITS = {
    "closed": "service.close()",
    "not closed": "",
    "in flight": "service.restore('v', wait=False)",
    "thread": "threading.Thread(target=save_for_ever, daemon=True).start()",
}
PROGRAM = """
import threading
from shardsnap import SnapshotError, SnapshotService
from tests.gpu.device import Marked
model = Marked()
model.mark(1)
service = SnapshotService(model, snapshots=3)
service.save("v")
def save_for_ever():
    try:
        while True:
            service.save("w").wait(60)
    except SnapshotError:
        pass  # it is closed
{}
print("done", flush=True)
"""


def test_processes_exit_cleanly() -> None:
    """All at once, as most of their time is that of importing torch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    programs = {
        way: subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(ending)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for way, ending in EXITS.items()
    }
    try:
        for way, program in programs.items():
            output, errors = program.communicate(timeout=SECONDS)
            assert (program.returncode, output) == (0, "done\n"), f"{way}: {errors}"
            for word in ("terminate called", "Traceback", "CUDA error", "Fatal"):
                assert word not in errors, f"{way}: {errors}"
    finally:
        for program in programs.values():
            program.kill()
            program.wait()
