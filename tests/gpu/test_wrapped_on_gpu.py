"""FSDP1 and FSDP2 on one GPU: one rank with nccl, and two ranks that share the GPU with gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import scenarios
from tests.distributed.launch import RankPool
from tests.gpu.device import DEVICE, ON_GPU, gpu
from tests.gpu.wrapping import BUILDS, on_device, one_rank

pytestmark = gpu

CASES = [
    ("fsdp1", {"strategy": "FULL_SHARD", "original": True}),
    ("fsdp1", {"strategy": "FULL_SHARD", "original": False}),
    ("fsdp1", {"strategy": "FULL_SHARD", "original": True, "mixed": True}),
    ("fsdp1", {"strategy": "SHARD_GRAD_OP", "original": False, "mixed": True}),
    ("fsdp2", {}),
    ("fsdp2", {"mixed": True}),
    ("fsdp2", {"mixed": True, "after": False}),
    ("fsdp2", {"after": True}),
]
NAMES = [f"{kind} {' '.join(f'{name}={value}' for name, value in options.items())}" for kind, options in CASES]


def round_trip(kind: str, options: dict[str, Any]) -> list[str]:
    with on_device():
        return scenarios.round_trip(BUILDS[kind], options)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)
def test_round_trip(kind: str, options: dict[str, Any]) -> None:
    with one_rank():
        assert len(round_trip(kind, options)) > 5


@pytest.mark.parametrize(("kind", "options"), [CASES[1], CASES[4]], ids=[NAMES[1], NAMES[4]])
def test_a_graph_from_before_a_restore_is_refused(kind: str, options: dict[str, Any]) -> None:
    with one_rank(), on_device():
        message = scenarios.stale_graph(BUILDS[kind], options)
    assert "modified by an inplace operation" in message or "has been modified inplace" in message


@pytest.mark.parametrize(
    ("case", "inner", "plain"),
    [(0, "blocks.1.module.0", "module.ignored.weight"), (4, "blocks.1.0", "ignored")],
    ids=["fsdp1", "fsdp2"],
)
def test_refused_inside_forward_and_backward(case: int, inner: str, plain: str) -> None:
    kind, options = CASES[case]
    with one_rank(), on_device():
        refusals = scenarios.refused_inside(BUILDS[kind], options, inner, plain)
    scenarios.check_refusals([refusals])


def shared_round_trip(kind: str, options: dict[str, Any]) -> list[str]:
    """One of two ranks on one device. First without shardsnap: empty where torch itself cannot do this."""
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    try:
        with on_device():
            model = BUILDS[kind](**options)
            scenarios.train(model, scenarios.optimizer_of(model))
            scenarios.output_of(model)
            scenarios.whole(model)
    except (RuntimeError, NotImplementedError) as error:
        print(f"gloo does not carry this wrapper here: {error}")
        return []
    return round_trip(kind, options)


def test_round_trips_of_two_ranks() -> None:
    """Real shards: with one rank FSDP1 does not shard at all."""
    pool = RankPool(2)
    try:
        answers = [names for case in (0, 3, 5) for names in pool.run(shared_round_trip, *CASES[case])]
    finally:
        pool.close()
    assert all(len(names) > 5 for names in answers if names)
    if not any(answers):
        pytest.skip("this torch cannot run FSDP over gloo on this device")
