"""How a service ends, and what happens around it: exits, interrupts, forks, garbage, leaks, and weights that leave."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardsnap import CopyError, SnapshotError, SnapshotService
from tests.reference import bag, every_verb, kept, scramble, values

ROOT = Path(__file__).resolve().parents[1]


def run(script: Callable[[], None], expected: int = 0, timeout: float = 60) -> str:
    """Run a function of this file in an interpreter of its own; return what it printed."""
    code = f"from {script.__module__} import {script.__name__} as script; script()"
    environment = {**os.environ, "SHARDSNAP_COPY_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == expected, done.stderr
    return done.stdout


def big_model(mebibytes: int = 96) -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.zeros(8 << 18)) for _ in range(mebibytes // 8))


def guarded(model: nn.Module, snapshots: int) -> SnapshotService:
    service = SnapshotService(model, snapshots)
    optimizer = torch.optim.SGD(model.parameters())
    service.guard(optimizer)
    model.__dict__["optimizer"] = optimizer  # as long as the model
    return service


KEPT_FOR_EXIT: list[object] = []


def exit_without_close() -> None:
    model = bag(a=torch.ones(1000))
    service = SnapshotService(model)
    service.save("v")
    service.restore("v")
    KEPT_FOR_EXIT.append(service)
    print("done")


def exit_with_a_ticket_in_flight() -> None:
    model = big_model(256)
    optimizer = torch.optim.SGD(model.parameters())
    service = SnapshotService(model, 1)
    service.guard(optimizer)
    ticket = service.save("v", fence="optimizer")
    KEPT_FOR_EXIT.extend([service, ticket, model, optimizer])
    print("in flight" if not ticket.done() else "done")


def exit_with_a_thread_that_saves() -> None:
    service = SnapshotService(big_model(32), 2)
    service.save("v")

    def save() -> None:
        while True:
            service.save("v")

    threading.Thread(target=save, daemon=True).start()
    time.sleep(0.1)
    print("done")


def collect_with_a_ticket_in_flight() -> None:
    model = big_model(256)
    for how in ("alone", "with the ticket"):
        optimizer = torch.optim.SGD(model.parameters())
        service = SnapshotService(model, 1)
        service.guard(optimizer)
        ticket = service.save("v", fence="optimizer")
        in_flight = not ticket.done()
        alive = weakref.ref(service)
        if how == "with the ticket":
            del ticket
        del service
        gc.collect()
        assert alive() is None
        assert how == "with the ticket" or ticket.done()
        print(how, in_flight)
    del model, optimizer
    gc.collect()


@pytest.mark.parametrize("script", [exit_without_close, exit_with_a_thread_that_saves])
def test_an_interpreter_exits_without_close(script: Callable[[], None]) -> None:
    assert run(script) == "done\n"


def test_an_interpreter_exits_with_a_ticket_in_flight() -> None:
    assert run(exit_with_a_ticket_in_flight) == "in flight\n"


def test_a_service_is_collected_with_a_ticket_in_flight() -> None:
    assert run(collect_with_a_ticket_in_flight).count("True") == 2


# ----------------------------------------------------------------------------------------------------------- interrupts


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def interrupt_a_wait() -> None:
    service = guarded(big_model(256), 4)
    for version in range(4):
        ticket = service.save(version, fence="optimizer")
    interrupt_after(0.02)
    try:
        ticket.wait()
    except KeyboardInterrupt:
        print("interrupted", ticket.done())
    ticket.wait()
    service.restore(3)
    interrupt_after(0.05)
    time.sleep(10)


def interrupt_a_save() -> None:
    model = big_model(512)
    service = SnapshotService(model, 2)
    service.save("v")
    interrupt_after(0.03)
    try:
        service.save("v")
    except KeyboardInterrupt:
        print("interrupted", service.versions(), service.stats().copies_in_flight)
    for weight in model.parameters():
        weight.data = torch.ones(2)
    service.drop("v")
    assert service.stats().arena.used == 0
    service.save("v")
    service.restore("v")


def interrupt_restores() -> None:
    """Exits with the code of an interrupt that nobody caught, by the last restore."""
    model = big_model(192)
    service = SnapshotService(model, 2)
    for value in (1, 2):
        with torch.no_grad():
            for weight in model:
                weight.fill_(value)
        service.save(value)
    inside = 0
    for attempt in range(12):
        restoring = False
        try:
            interrupt_after(0.002 + 0.002 * attempt)
            restoring = True
            service.restore(1 + attempt % 2)
            restoring = False
            time.sleep(5)
        except KeyboardInterrupt:
            inside += restoring
        assert service.stats().copies_in_flight == 0
        assert len(values(model)) == 1
    print("inside", inside)
    interrupt_after(0.02)
    while True:
        service.restore(1)


def interrupt_a_conversion() -> None:
    model = nn.ModuleList(bag(x=torch.full((1 << 14,), 5.0)) for _ in range(400))
    service = SnapshotService(model, 2)
    service.save("v")
    model.to(torch.bfloat16)
    caught = 0
    for attempt in range(20):
        for part in model:
            part.x.fill_(1)
        restoring = False
        try:
            interrupt_after(0.001 * (1 + attempt % 10))
            restoring = True
            service.restore("v", strict=False)
            restoring = False
            time.sleep(5)
        except KeyboardInterrupt:
            caught += restoring
        mixed = len({float(part.x[0]) for part in model}) > 1
        try:
            service.save("whole")
            assert not mixed, "mixed weights were saved"
        except CopyError:
            # Also where the interrupt came just before the first write or after the last one: that may be called mixed.
            assert restoring, "whole weights were refused without an interrupt"
            service.restore("v", strict=False)
            service.save("whole")
        service.drop("whole")
    print("caught", caught)


def test_a_wait_can_be_interrupted() -> None:
    assert run(interrupt_a_wait, expected=-signal.SIGINT) == "interrupted False\n"


def test_a_save_can_be_interrupted() -> None:
    assert run(interrupt_a_save) == "interrupted ('v',) 0\n"


def test_weights_are_whole_after_an_interrupted_restore() -> None:
    word, inside = run(interrupt_restores, expected=-signal.SIGINT).split()
    assert word == "inside"
    assert int(inside) > 0


def test_a_conversion_that_is_interrupted_is_known_to_be_mixed() -> None:
    word, caught = run(interrupt_a_conversion).split()
    assert word == "caught"
    assert int(caught) > 0


# ---------------------------------------------------------------------------------------------------------------- forks


def wait_for(child: int, seconds: float = 20) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def fork_while_idle() -> None:
    """The child is a whole interpreter that ends as one: finalizers, atexit and destructors."""
    model = bag(a=torch.ones(1000))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    service = SnapshotService(model, 2)
    service.save("v")
    KEPT_FOR_EXIT.append(service)
    child = os.fork()
    if child == 0:
        for verb in every_verb(service, optimizer):
            with pytest.raises(SnapshotError, match="fork"):
                verb()
        service.close()
        sys.exit(7)
    assert wait_for(child) == 7
    model.a.fill_(2)
    service.restore("v")
    assert model.a.unique() == 1
    service.save("w")
    print("done")


def fork_while_another_thread_saves() -> None:
    """The child's copy of the lock is held by a thread that it does not have."""
    model = big_model(64)
    service = SnapshotService(model, 2)
    service.save("v")
    stopping = False

    def save() -> None:
        while not stopping:
            service.save("v")

    saver = threading.Thread(target=save)
    saver.start()
    codes = []
    for _ in range(5):
        time.sleep(0.02)
        child = os.fork()
        if child == 0:
            try:
                service.save("w")
            except SnapshotError:
                service.close()
                del service
                gc.collect()
                os._exit(5)
            os._exit(1)
        codes.append(wait_for(child))
    stopping = True
    saver.join()
    assert codes == [5] * 5, codes
    service.restore("v")
    print("done")


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


def load_data_with_forked_workers() -> None:
    service = guarded(big_model(64), 2)
    for epoch in range(2):
        ticket = service.save(epoch, fence="optimizer")
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        assert sum(int(batch.sum()) for batch in loader) == 190
        ticket.wait()
        service.restore(epoch)
    print("done")


@pytest.mark.parametrize("script", [fork_while_idle, fork_while_another_thread_saves, load_data_with_forked_workers])
def test_forks(script: Callable[[], None]) -> None:
    assert run(script) == "done\n"


# ------------------------------------------------------------------------------------------------ weights that go away


def free_weights_that_are_being_read() -> None:
    """A copy that reads freed memory of this size is killed: it has been unmapped."""
    for how in ("held", "dropped"):
        model = bag(a=nn.Parameter(torch.ones(64 << 20)))
        service = guarded(model, 1)
        ticket = service.save("v", fence="optimizer")
        in_flight = not ticket.done()
        if how == "dropped":
            service.drop("v")
            del ticket
        model.a.data = torch.zeros(1)
        service.close()
        print(how, in_flight)


def test_weights_stay_as_long_as_a_copy_reads_them() -> None:
    assert run(free_weights_that_are_being_read) == "held True\ndropped True\n"


@pytest.mark.parametrize("fence", ["stream", "optimizer"])
def test_weights_that_were_offloaded_are_freed_though_the_service_lives(fence: str) -> None:
    model = bag(a=nn.Parameter(torch.ones(1000)), b=torch.ones(1000))
    service = guarded(model, 2)
    before = kept(model)
    ticket = service.save("v", fence=fence)  # type: ignore[arg-type]
    service.restore("v")
    ticket.wait()
    old = [StorageWeakRef(tensor.untyped_storage()) for tensor in (model.a, model.b)]
    assert not any(storage.expired() for storage in old)
    for tensor in (model.a, model.b):
        tensor.data = tensor.data.clone()
    assert all(storage.expired() for storage in old)
    scramble(model)
    service.restore("v")
    assert kept(model) == before
    service.close()


def test_a_ticket_holds_the_weights_until_the_copy_has_ended_and_no_longer() -> None:
    model = bag(a=nn.Parameter(torch.ones(16 << 20)))
    optimizer = torch.optim.SGD(model.parameters())
    with SnapshotService(model, 1) as service:
        service.guard(optimizer)
        ticket = service.save("v", fence="optimizer")
        old = StorageWeakRef(model.a.untyped_storage())
        model.a.data = torch.empty(0)
        while True:
            expired = old.expired()
            if ticket._copies[0].done():
                break
            assert not expired
        optimizer.step()  # its guard notices that the copy has ended
        assert old.expired()


# ---------------------------------------------------------------------------------------------------------------- leaks


def resources() -> tuple[int, int, int]:
    """Resident bytes, open files, threads."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208


def test_a_thousand_rounds_leave_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.BatchNorm1d(256))
    optimizer = torch.optim.SGD(model.parameters())
    with SnapshotService(model, 2) as service:
        service.guard(optimizer)

        def rounds(first: int, last: int) -> None:
            for step in range(first, last):
                ticket = service.save(f"step {step}", fence=("stream", "optimizer")[step % 2])  # type: ignore[arg-type]
                with contextlib.suppress(KeyError):
                    service.restore("gone")
                service.restore(f"step {step}", wait=step % 3 > 0)
                service.drop(f"step {step}")
                service.guard(optimizer).remove()
                del ticket

        rounds(0, 200)
        gc.collect()
        before = resources()
        objects = len(gc.get_objects())
        rounds(200, 1200)
        gc.collect()
        after = resources()
        assert after[0] - before[0] < 4 << 20
        assert after[1:] == before[1:]
        assert len(gc.get_objects()) - objects < 200
        assert service.stats().arena.used == 0


def test_fifty_services_leave_nothing_behind() -> None:
    model = big_model(16)

    def services(count: int) -> None:
        for index in range(count):
            service = SnapshotService(model, 2)
            service.save("v")
            service.restore("v")
            if index % 2:
                service.close()

    services(3)
    gc.collect()
    before = resources()
    services(50)
    gc.collect()
    after = resources()
    assert after[0] - before[0] < 16 << 20
    assert after[1:] == before[1:]


def test_close_gives_the_memory_back() -> None:
    model = big_model(32)
    before = resources()[0]
    service = SnapshotService(model, 4)
    service.save("v")
    assert resources()[0] - before > 100 << 20
    service.close()
    assert resources()[0] - before < 16 << 20
