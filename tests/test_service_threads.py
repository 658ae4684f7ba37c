"""Verbs from several threads at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardsnap import SnapshotError, SnapshotService, UnknownVersionError
from tests.reference import values

SECONDS = 30  # after which threads count as deadlocked


def marked_model(parts: int = 24, elements: int = 40_000) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(parts))


def mark(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)


class Crew:
    """Threads that must all end, and whose exceptions are this test's."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> None:
        def body() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=body, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        deadline = time.monotonic() + SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a thread is deadlocked"


@contextmanager
def crew() -> Iterator[Crew]:
    threads = Crew()
    yield threads
    threads.join()
    assert threads.errors == []


def test_snapshots_are_never_torn() -> None:
    """Weights change by restores alone; every snapshot taken meanwhile is all of one of them."""
    model = marked_model()
    with SnapshotService(model, 18) as service:
        for generation in range(3):
            mark(model, generation)
            service.save(generation)

        def restore(worker: int) -> None:
            for turn in range(60):
                report = service.restore((worker + turn) % 3, wait=bool(turn % 2))
                assert len(report.restored) == len(model)

        def save(worker: int) -> None:
            for turn in range(60):
                service.save(f"{worker} {turn % 3}")
                service.versions()
                service.stats()

        with crew() as threads:
            for worker in range(3):
                threads.start(lambda worker=worker: restore(worker))
                threads.start(lambda worker=worker: save(worker))
        assert len(service.versions()) == 12
        seen = set()
        for version in service.versions():
            mark(model, -1)
            service.restore(version)
            found = values(model)
            assert len(found) == 1, version
            seen |= found
        assert seen == {0, 1, 2}


def test_steps_and_saves_with_the_optimizer_fence_do_not_mix() -> None:
    model = marked_model()
    for weight in model:
        weight.grad = torch.full_like(weight, -1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    saved: list[float] = []
    with SnapshotService(model, 4) as service:
        service.guard(optimizer)

        def poll() -> None:
            while len(saved) < 40:
                service.versions()
                service.fence()
                time.sleep(0.001)

        with crew() as threads:
            threads.start(poll)
            threads.start(poll)
            for step in range(40):
                service.save("pi_old", fence="optimizer")
                optimizer.step()
                service.restore("pi_old")
                assert values(model) == {step}
                optimizer.step()
                service.drop("pi_old")
                saved.append(step)


def test_save_over_and_drop_from_several_threads() -> None:
    model = marked_model(parts=6)
    with SnapshotService(model, 8) as service:
        service.save("kept")

        def churn(worker: int) -> None:
            for turn in range(150):
                service.save("shared")
                if turn % 3 == worker:
                    try:
                        service.drop("shared")
                    except UnknownVersionError:
                        continue

        with crew() as threads:
            for worker in range(3):
                threads.start(lambda worker=worker: churn(worker))
        stats = service.stats()
        size = stats.arena.mapped // 8
        assert stats.saves == 451
        assert stats.arena.used == size * len(service.versions())
        generations = {version.version: version.generation for version in stats.versions}
        assert generations.get("shared", 450) <= 450


def test_close_while_other_threads_save_and_restore() -> None:
    for attempt in range(8):
        model = marked_model()
        service = SnapshotService(model, 6)
        service.save("v")
        refusals: list[str] = []

        def work(verb: Callable[[], object], refusals: list[str] = refusals) -> None:
            try:
                while True:
                    verb()
            except SnapshotError as error:
                refusals.append(str(error))

        with crew() as threads:
            threads.start(lambda service=service: work(lambda: service.save("w")))
            threads.start(lambda service=service: work(lambda: service.save("x")))
            threads.start(lambda service=service: work(lambda: service.restore("v")))
            threads.start(lambda service=service: work(service.stats))
            time.sleep(0.01 * attempt)
            service.close()
            service.close()
        assert refusals == ["the service is closed"] * 4


def test_a_ticket_may_be_waited_for_by_several_threads() -> None:
    model = marked_model(parts=60)
    with SnapshotService(model, 2) as service:
        optimizer = torch.optim.SGD(model.parameters())
        service.guard(optimizer)
        for _ in range(10):
            ticket = service.save("v", fence="optimizer")
            ended: list[bool] = []
            with crew() as threads:
                for _ in range(4):
                    threads.start(
                        lambda ticket=ticket, ended=ended: ended.append(ticket.wait(SECONDS) or ticket.done())
                    )
            assert ended == [True] * 4
