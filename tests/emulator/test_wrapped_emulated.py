"""FSDP1 and FSDP2 over two ranks, each of which copies through the CUDA backend."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from shardsnap import SnapshotService
from tests.distributed import scenarios
from tests.distributed.test_layout_fsdp1 import wrapped
from tests.distributed.test_layout_fsdp2 import sharded
from tests.emulator.processes import NOTHING_LIVES, Emulated, emulator_counts, live_counts

BUILDS = {"fsdp1": wrapped, "fsdp2": sharded}


def round_trip(kind: str, options: dict[str, Any]) -> list[str]:
    names = scenarios.round_trip(BUILDS[kind], options)
    gc.collect()
    counts = emulator_counts()
    assert counts["batch_copies"] + counts["single_copies"] > 0, "the copies went another way"
    assert live_counts() == NOTHING_LIVES
    return names


def fenced_rounds(kind: str, options: dict[str, Any], rounds: int) -> bool:
    return scenarios.fenced_rounds(BUILDS[kind], options, rounds)


CASES = [
    ("fsdp1", {"strategy": "FULL_SHARD", "original": True}),
    ("fsdp1", {"strategy": "SHARD_GRAD_OP", "original": False, "mixed": True}),
    ("fsdp2", {"mixed": False}),
    ("fsdp2", {"mixed": True, "after": False}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("driver", [12000, 13000])
def test_round_trip(emulated: Emulated, driver: int, kind: str, options: dict[str, Any]) -> None:
    answers = emulated.on_ranks(2, round_trip, kind, options, driver=driver)
    assert all(len(names) > 5 for names in answers)


@pytest.mark.parametrize(("kind", "options"), [CASES[0], CASES[2]])
def test_fenced_rounds(emulated: Emulated, kind: str, options: dict[str, Any]) -> None:
    assert any(emulated.on_ranks(2, fenced_rounds, kind, options, 50))


def refused_pinning(rank_error: str) -> str:
    try:
        SnapshotService(sharded(), pin="require")
    except Exception as error:
        scenarios.check_group_works()
        return f"{type(error).__name__}: {error}"
    return rank_error


def test_refused_pinning_is_an_error_on_every_rank(emulated: Emulated) -> None:
    for answer in emulated.on_ranks(2, refused_pinning, "no error", register_result=2):
        assert answer.startswith("PinningError: ")
        assert "CUDA_ERROR_OUT_OF_MEMORY" in answer
