"""What happens once per model: its layout, and the plan that says where each region lies in a snapshot."""

from __future__ import annotations

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.board import Board, LapTable, Target
from benchmarks.race import Path, race
from benchmarks.settings import Settings
from benchmarks.workloads import Weights
from shardsnap import _C
from shardsnap.layout import Layout, layout_of
from shardsnap.transfer import SnapshotPlan, plan_snapshots

_REGIONS = 10_000
_ELEMENTS = 256
_CHUNK_BYTES = 4 << 20


def test_plan(benchmark: BenchmarkFixture, settings: Settings, board: Board) -> None:
    model = Weights([_ELEMENTS] * _REGIONS)
    layout = layout_of(model)
    addresses = np.array([region.address for region in layout.regions], dtype=np.uint64)
    sizes = np.array([region.nbytes for region in layout.regions], dtype=np.uint64)

    def pack_and_plan() -> _C.CopyPlan:
        offsets, _ = _C.pack_regions(addresses, sizes)
        return _C.CopyPlan(addresses, offsets, sizes, chunk_bytes=_CHUNK_BYTES)

    def whole() -> tuple[Layout, SnapshotPlan]:
        fresh = layout_of(model)
        return fresh, plan_snapshots(fresh)

    assert pack_and_plan().bytes == whole()[1].nbytes == _REGIONS * _ELEMENTS * 4

    subject = Path("pack_regions and CopyPlan", pack_and_plan)
    others = [
        Path("plan_snapshots of a layout", lambda: plan_snapshots(layout)),
        Path("layout_of the model and plan_snapshots", whole),
    ]
    laps = race(benchmark, subject, others, settings.rounds)
    target = Target(f"{subject.name}, {_REGIONS} regions", laps[0].seconds * 1e3, "<=", 50, " ms")
    board.record(benchmark, LapTable(f"plan {_REGIONS} regions, once per model", 0, laps), [target])
