"""One model, and everywhere its weights are copied to and from."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

import shardsnap
from benchmarks.floor import Block, Copies, Floor
from benchmarks.memory import resident_bytes
from benchmarks.race import Path
from benchmarks.stamps import check_equal, check_stamp, stamp
from benchmarks.workloads import Weights

SUBJECT = "shardsnap"
TO_CPU = '.to("cpu", copy=True) per tensor'
FLOOR = "floor: huge pages to huge pages"
FLOOR_SAVE = "floor: ordinary pages of the weights to huge pages"
FLOOR_RESTORE = "floor: huge pages to ordinary pages of the weights"

_VERSION = "pi_old"
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Route:
    """A way from tensors to tensors."""

    name: str
    run: Callable[[], object]
    source: Sequence[torch.Tensor]
    to: Sequence[torch.Tensor]


class Stage:
    """The weights in ordinary pages, and the places to copy them to.

    These are a service with room for one snapshot, ordinary tensors that are kept, ordinary tensors that each save
    allocates again, and two blocks of huge pages for the floor.

    Attributes:
        nbytes: of the weights.
        mapped_ratio: bytes that the service has mapped for one snapshot, over nbytes.
        resident_ratio: by how much the process has grown with the service, over nbytes.
    """

    def __init__(self, sizes: Sequence[int], floor: Floor) -> None:
        self._floor = floor
        # Nothing is timed before the first race, and threads that wait for each other crawl on a busy machine.
        with _one_torch_thread():
            self._set_up(sizes)
            self._rehearse()

    def _set_up(self, sizes: Sequence[int]) -> None:
        self._marks = map(float, itertools.count(1))
        self._mark = 0.0
        model = Weights(sizes)
        self._live = model.tensors()
        self.nbytes = sum(map(_bytes_of, self._live))
        gc.collect()
        before = resident_bytes()
        self._service = shardsnap.SnapshotService(model, snapshots=1)
        self._service.save(_VERSION)
        self.resident_ratio = (resident_bytes() - before) / self.nbytes
        self.mapped_ratio = self._service.stats().arena.mapped / self.nbytes

        self._kept = [tensor.clone() for tensor in self._live]
        self._fresh: list[torch.Tensor] = []
        room = [-(-_bytes_of(tensor) // _ALIGNMENT) * _ALIGNMENT for tensor in self._live]
        self._blocks = [Block(sum(room)) for _ in range(2)]
        offsets = list(itertools.accumulate(room, initial=0))[:-1]
        self._near, self._far = (
            [block.tensor(offset, like) for offset, like in zip(offsets, self._live, strict=True)]
            for block in self._blocks
        )

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._service.close()
        # The views of the blocks must be gone before the blocks are, and a failed test may still know this stage.
        self._live, self._kept, self._fresh, self._near, self._far = [], [], [], [], []
        for block in self._blocks:
            block.close()

    def save_paths(self) -> tuple[Path, list[Path]]:
        """The service's save, and the other ways to keep a copy of the weights."""
        to_cpu = Path(TO_CPU, self._save_to_fresh, self._before_fresh, lambda: self._check(self._fresh, TO_CPU))
        return (
            Path(SUBJECT, lambda: self._service.save(_VERSION), self._before_save, self._check_saved),
            [to_cpu, *map(self._path, self._save_routes())],
        )

    def restore_paths(self) -> tuple[Path, list[Path]]:
        """The service's restore, and the other ways to put a copy back into the weights."""
        self._fresh.clear()
        return (
            Path(SUBJECT, self._restore, self._before_restore, lambda: self._check(self._live, SUBJECT)),
            [self._path(route) for route in self._restore_routes()],
        )

    def _save_routes(self) -> list[_Route]:
        live, kept, near, far = self._live, self._kept, self._near, self._far
        return [
            _Route("copy_ per tensor into tensors kept", lambda: _copy_each(kept, live), live, kept),
            _Route("torch._foreach_copy_ into tensors kept", lambda: torch._foreach_copy_(kept, live), live, kept),
            self._floor_route(FLOOR_SAVE, live, near),
            self._floor_route(FLOOR, far, near),
        ]

    def _restore_routes(self) -> list[_Route]:
        live, kept, near, far = self._live, self._kept, self._near, self._far
        return [
            _Route("copy_ per tensor from tensors kept", lambda: _copy_each(live, kept), kept, live),
            _Route("torch._foreach_copy_ from tensors kept", lambda: torch._foreach_copy_(live, kept), kept, live),
            self._floor_route(FLOOR_RESTORE, near, live),
            self._floor_route(FLOOR, near, far),
        ]

    def _floor_route(self, name: str, source: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> _Route:
        pairs = zip(to, source, strict=True)
        copies = Copies.of((one.data_ptr(), other.data_ptr(), _bytes_of(one)) for one, other in pairs)
        return _Route(name, lambda: self._floor.copy(copies), source, to)

    def _path(self, route: _Route) -> Path:
        return Path(
            route.name,
            route.run,
            before=lambda: self._stamp(route.source),
            after=lambda: self._check(route.to, route.name),
        )

    def _rehearse(self) -> None:
        """Take every path once and compare every element; the races look at the stamps alone."""
        for route in (*self._save_routes(), *self._restore_routes()):
            _wipe(route.to)
            self._stamp(route.source)
            route.run()
            check_equal(route.to, route.source, route.name)
        self._before_fresh()
        self._save_to_fresh()
        check_equal(self._fresh, self._live, TO_CPU)
        self._fresh.clear()
        self._before_save()
        self._service.save(_VERSION)
        _copy_each(self._kept, self._live)
        _wipe(self._live)
        self._restore()
        check_equal(self._live, self._kept, SUBJECT)

    def _stamp(self, tensors: Sequence[torch.Tensor]) -> None:
        self._mark = next(self._marks)
        stamp(tensors, self._mark)

    def _check(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        assert tensors, what
        check_stamp(tensors, self._mark, what)

    def _save_to_fresh(self) -> None:
        """As verl's fsdp1_sharded_save_to_cpu does."""
        self._fresh = [tensor.detach().to("cpu", copy=True) for tensor in self._live]

    def _before_fresh(self) -> None:
        self._stamp(self._live)
        # Right before the next ones are allocated: a hypervisor that takes free pages back has not taken these yet.
        self._fresh.clear()

    def _before_save(self) -> None:
        self._service.drop(_VERSION)
        self._stamp(self._live)

    def _check_saved(self) -> None:
        stamp(self._live, -1.0)
        self._restore()
        self._check(self._live, SUBJECT)

    def _before_restore(self) -> None:
        self._before_save()
        self._service.save(_VERSION)
        stamp(self._live, -1.0)

    def _restore(self) -> None:
        self._service.restore(_VERSION, wait=True)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_each(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    for one, other in zip(to, source, strict=True):
        one.copy_(other)


def _wipe(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()
