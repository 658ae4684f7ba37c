"""The work that does not depend on bytes: a model of ten thousand tensors of 1 KiB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import shardsnap
from benchmarks.board import Board, LapTable, Target
from benchmarks.race import Path, race
from benchmarks.settings import Settings
from benchmarks.stamps import check_stamp, stamp
from benchmarks.workloads import Weights

_REGIONS = 10_000
_ELEMENTS = 256
_ROUNDS_EACH = 5  # a round takes milliseconds


class _Tiny:
    """The model, its service, and a save and a restore in the middle of many."""

    def __init__(self) -> None:
        model = Weights([_ELEMENTS] * _REGIONS)
        self._live = model.tensors()
        self._mark = 0.0
        self.nbytes = _REGIONS * _ELEMENTS * 4
        self.service = shardsnap.SnapshotService(model, snapshots=1)
        self.service.save("pi_old")

    def before_save(self) -> None:
        self._mark += 1.0
        stamp(self._live, self._mark)
        self.service.drop("pi_old")

    def save(self) -> None:
        self.service.save("pi_old")

    def check_saved(self) -> None:
        stamp(self._live, -1.0)
        self.restore()
        self.check_restored()

    def before_restore(self) -> None:
        self.before_save()
        self.save()
        stamp(self._live, -1.0)

    def restore(self) -> None:
        self.service.restore("pi_old", wait=True)

    def check_restored(self) -> None:
        check_stamp(self._live, self._mark, "a restore")

    def copy_each(self) -> list[torch.Tensor]:
        return [tensor.detach().to("cpu", copy=True) for tensor in self._live]


@pytest.fixture(scope="module")
def tiny() -> Iterator[_Tiny]:
    opened = _Tiny()
    yield opened
    opened.service.close()


def test_save(benchmark: BenchmarkFixture, tiny: _Tiny, settings: Settings, board: Board) -> None:
    subject = Path("shardsnap", tiny.save, tiny.before_save, tiny.check_saved)
    others = [Path('.to("cpu", copy=True) per tensor', tiny.copy_each)]
    laps = race(benchmark, subject, others, settings.rounds * _ROUNDS_EACH)
    target = Target(f"host time of a save of {_REGIONS} tensors of 1 KiB", laps[0].seconds * 1e3, "<=", 10, " ms")
    board.record(benchmark, LapTable(f"save: {_REGIONS} tensors of 1 KiB", tiny.nbytes, laps), [target])


def test_restore(benchmark: BenchmarkFixture, tiny: _Tiny, settings: Settings, board: Board) -> None:
    subject = Path("shardsnap", tiny.restore, tiny.before_restore, tiny.check_restored)
    laps = race(benchmark, subject, [], settings.rounds * _ROUNDS_EACH)
    board.record(benchmark, LapTable(f"restore: {_REGIONS} tensors of 1 KiB", tiny.nbytes, laps))
