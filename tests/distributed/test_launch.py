"""The launcher: what a case that raises, dies or hangs does to its test, and that it does nothing to the next one."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import Ranks, RanksFailedError


def total(value: int) -> tuple[int, int, float]:
    tensor = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(tensor)
    return dist.get_rank(), os.getpid(), tensor.item()


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raises":
            raise KeyError("on purpose")
        if how == "dies":
            os._exit(7)
        time.sleep(60)
    dist.barrier()  # the others wait for a rank that does not come


def test_processes_are_kept_between_cases(run_ranks: Ranks) -> None:
    first, second = run_ranks(2, total, 1), run_ranks(2, total, 10)
    assert [answer[0] for answer in first] == [0, 1]
    assert [answer[1] for answer in first] == [answer[1] for answer in second]
    assert [answer[2] for answer in first] == [3.0, 3.0]
    assert second[0][2] == 21.0


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("raises", ["rank 1 raised", "KeyError: 'on purpose'", "rank 0 hung", "dist.barrier"]),
        ("dies", ["rank 1 died (exit code 7)", "rank 0 hung"]),
        ("hangs", ["rank 1 hung", "rank 0 hung", "in fail_on"]),
    ],
)
def test_a_failed_case_tells_about_every_rank_and_leaves_no_trace(how: str, messages: list[str]) -> None:
    ranks = Ranks()
    try:
        with pytest.raises(RanksFailedError) as caught:
            ranks(2, fail_on, 1, how, timeout=4)
        text = str(caught.value)
        assert all(
            message in text or (message == "rank 0 hung" and "rank 0 raised" in text) for message in messages[:3]
        )
        assert "fail_on" in text
        assert [answer[2] for answer in ranks(2, total, 1)] == [3.0, 3.0]
    finally:
        ranks.close()
