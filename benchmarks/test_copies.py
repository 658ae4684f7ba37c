"""Saves and restores of whole models, against other ways to copy the same bytes and against the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.board import Board, LapTable, Target
from benchmarks.floor import Floor
from benchmarks.race import race, ratio_to
from benchmarks.settings import Settings
from benchmarks.stage import FLOOR, TO_CPU, Stage
from benchmarks.workloads import QWEN3_0_6B, shard_sizes, uniform_sizes

_RANKS = 8


@dataclass(frozen=True)
class Workload:
    """A model by name, and the elements of its tensors in a run of some size."""

    name: str
    sizes: Callable[[Settings], Sequence[int]]


_WORKLOADS = (
    Workload("64 tensors of one size", lambda settings: uniform_sizes(settings.nbytes, tensors=64)),
    Workload(f"Qwen3-0.6B, one of {_RANKS} FSDP2 ranks", lambda _: shard_sizes(QWEN3_0_6B, _RANKS)),
)


@pytest.fixture(scope="module", params=_WORKLOADS, ids=lambda workload: workload.name)
def workload(request: pytest.FixtureRequest) -> Workload:
    chosen: Workload = request.param
    return chosen


@pytest.fixture(scope="module")
def stage(workload: Workload, settings: Settings, floor: Floor) -> Iterator[Stage]:
    with Stage(workload.sizes(settings), floor) as opened:
        yield opened


def test_save(benchmark: BenchmarkFixture, stage: Stage, workload: Workload, settings: Settings, board: Board) -> None:
    laps = race(benchmark, *stage.save_paths(), settings.rounds)
    targets = [
        Target(f"save, times as fast as {TO_CPU}: {workload.name}", ratio_to(laps, TO_CPU), ">=", 5, "x"),
        Target(f"save, part of the floor's rate: {workload.name}", ratio_to(laps, FLOOR), ">=", 0.85),
        *(
            Target(f"host memory {what} over bytes of the snapshot: {workload.name}", ratio, "<=", 1.01, "x")
            for what, ratio in (("mapped", stage.mapped_ratio), ("resident", stage.resident_ratio))
        ),
    ]
    board.record(benchmark, LapTable(f"save: {workload.name}", stage.nbytes, laps), targets)


def test_restore(
    benchmark: BenchmarkFixture, stage: Stage, workload: Workload, settings: Settings, board: Board
) -> None:
    laps = race(benchmark, *stage.restore_paths(), settings.rounds)
    target = Target(f"restore, part of the floor's rate: {workload.name}", ratio_to(laps, FLOOR), ">=", 0.85)
    board.record(benchmark, LapTable(f"restore: {workload.name}", stage.nbytes, laps), [target])
