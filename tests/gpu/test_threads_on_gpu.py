"""Verbs from several threads at once, on streams of their own, and from threads that have never used CUDA."""

from __future__ import annotations

import contextlib
import threading

import torch

from shardsnap import SnapshotService, UnknownVersionError
from tests.gpu.device import DEVICE, ON_GPU, SECONDS, Marked, gpu, synchronize
from tests.test_service_threads import crew

pytestmark = gpu


def own_stream() -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(DEVICE)) if ON_GPU else contextlib.nullcontext()


def test_snapshots_are_never_torn() -> None:
    """Weights change by restores alone; every snapshot taken meanwhile is all of one of them."""
    model = Marked(parts=8, elements=1 << 20)
    with SnapshotService(model, snapshots=24) as service:
        for generation in range(3):
            model.mark(generation)
            service.save(generation).wait(SECONDS)

        def restore(worker: int) -> None:
            for turn in range(40):
                service.restore((worker + turn) % 3, wait=bool(turn % 2))

        def save(worker: int) -> None:
            for turn in range(40):
                service.save(f"{worker} {turn % 3}").wait(SECONDS)
                service.stats()

        with crew() as threads:
            for worker in range(3):
                threads.start(lambda worker=worker: restore(worker))
                threads.start(lambda worker=worker: save(worker))
        assert len(service.versions()) == 12
        for version in service.versions():
            model.mark(-1)
            service.restore(version)
            found = model.values()
            assert len(found) == 1, version
            assert found < {0, 1, 2}, version


def test_saves_from_streams_of_their_own() -> None:
    """Each thread saves on its stream while nobody writes; then every version holds the same weights."""
    model = Marked(parts=4, elements=1 << 20)
    model.mark(5)
    synchronize()
    with SnapshotService(model, snapshots=18) as service:

        def work(worker: int) -> None:
            with own_stream():
                for turn in range(30):
                    service.save(f"{worker} {turn % 2}").wait(SECONDS)
                    if turn % 7 == 6:
                        with contextlib.suppress(UnknownVersionError):
                            service.drop(f"{worker} {turn % 2}")

        with crew() as threads:
            for worker in range(6):
                threads.start(lambda worker=worker: work(worker))
        for version in service.versions():
            model.mark(-1)
            service.restore(version)
            assert model.values() == {5}


def test_a_thread_that_has_never_used_cuda() -> None:
    model = Marked(parts=2, elements=1 << 18)
    with SnapshotService(model, snapshots=2) as service:
        model.mark(3)
        synchronize()
        with crew() as threads:
            threads.start(lambda: service.save("v").wait(SECONDS))
        model.mark(-1)
        synchronize()
        with crew() as threads:
            threads.start(lambda: service.restore("v") and None)
        assert model.values() == {3}


def test_close_while_other_threads_copy() -> None:
    for attempt in range(4):
        model = Marked(parts=4, elements=1 << 20)
        service = SnapshotService(model, snapshots=4)
        model.mark(attempt)
        service.save("v").wait(SECONDS)
        started = threading.Barrier(3)
        refusals: list[str] = []

        def work(
            verb: str,
            service: SnapshotService = service,
            started: threading.Barrier = started,
            refusals: list[str] = refusals,
        ) -> None:
            started.wait(SECONDS)
            try:
                while True:
                    if verb == "save":
                        service.save("w").wait(SECONDS)
                    else:
                        service.restore("v")
            except Exception as error:
                refusals.append(str(error))

        with crew() as threads:
            threads.start(lambda: work("save"))
            threads.start(lambda: work("restore"))
            started.wait(SECONDS)
            service.close()
        assert refusals == ["the service is closed"] * 2
        synchronize()
        assert model.values() == {attempt}
