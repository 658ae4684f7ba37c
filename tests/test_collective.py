"""The parts of an agreement that need no second rank."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardsnap import PeerRankError, SnapshotError
from shardsnap.collective import Agreement, Verdict, _digest, _explain, _rank_list
from shardsnap.service import _agree


def test_digests_are_the_same_in_every_process() -> None:
    assert _digest("pi_old") == 7704834895291654269
    assert _digest(7) == 3098598607917743281


def test_digests_tell_keys_apart_and_fit_a_signed_integer() -> None:
    keys = [None, "None", "", 0, "0", 1, "1", -1, "pi_old", "pi_old ", 1 << 70]
    digests = [_digest(key) for key in keys]
    assert len(set(digests)) == len(keys)
    assert all(0 <= digest < 1 << 63 for digest in digests)


def test_failures_name_their_ranks() -> None:
    verdicts = [
        (0, Verdict("restore", "v", 1)),
        (2, Verdict("restore", "v", 1, "LayoutMismatchError: no")),
        (5, Verdict("restore", "v", 0, "UnknownVersionError: gone")),
    ]
    assert _explain(verdicts) == (
        "ranks 2, 5 cannot restore 'v':\n  rank 2: LayoutMismatchError: no\n  rank 5: UnknownVersionError: gone"
    )
    assert _explain([(0, Verdict("create a service")), (1, Verdict("create a service", failure="ValueError: x"))]) == (
        "rank 1 cannot create a service:\n  rank 1: ValueError: x"
    )


def test_other_calls_are_told_apart() -> None:
    text = _explain([(0, Verdict("restore", "v", 1)), (1, Verdict("restore", "w", 1))])
    assert "rank 0 restore 'v', rank 1 restore 'w'" in text
    assert "same calls in the same order" in text
    text = _explain([(0, Verdict("restore", "v", 1)), (1, Verdict("finish restoring", "v", 1))])
    assert "rank 1 finish restoring 'v'" in text


def test_other_generations_name_who_is_behind() -> None:
    verdicts = [(rank, Verdict("restore", 7, generation)) for rank, generation in ((0, 3), (1, 2), (2, 3), (3, 1))]
    text = _explain(verdicts)
    assert text.startswith("the ranks hold different saves of 7: rank 0 holds generation 3, rank 1 holds generation 2,")
    assert "ranks 1, 3 missed a later save" in text


def test_rank_lists() -> None:
    assert _rank_list([4]) == "rank 4"
    assert _rank_list([1, 3]) == "ranks 1, 3"


class Peers:
    """An agreement with peers that all say what this test says."""

    def __init__(self, objection: str | None = None) -> None:
        self.objection = objection
        self.seen: list[Verdict] = []

    def exchange(self, verdict: Verdict) -> None:
        self.seen.append(verdict)
        if self.objection is not None:
            raise PeerRankError(self.objection)


def test_agreeing() -> None:
    verdict = Verdict("restore", "v", 2)
    assert _agree(None, verdict, lambda: 5) == 5
    peers: Any = Peers()
    assert _agree(peers, verdict, lambda: 5) == 5
    assert peers.seen == [verdict]


def test_a_peer_that_cannot_go_on_stops_this_rank() -> None:
    peers: Any = Peers("rank 1 cannot")
    with pytest.raises(PeerRankError, match="rank 1 cannot"):
        _agree(peers, Verdict("restore", "v", 2), lambda: 5)


def test_a_failure_here_is_told_and_raised_as_it_is() -> None:
    def fail() -> None:
        raise SnapshotError("no room")

    peers: Any = Peers("ranks 0, 1 cannot restore")
    with pytest.raises(SnapshotError, match="no room") as caught:
        _agree(peers, Verdict("restore", "v", 2), fail)
    assert peers.seen == [Verdict("restore", "v", 2, "SnapshotError: no room")]
    assert getattr(caught.value, "__notes__", []) in ([], ["ranks 0, 1 cannot restore"])


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_no_agreement_without_peers() -> None:
    assert Agreement.over(None, timedelta(seconds=5)) is None


def test_no_agreement_without_distributed() -> None:
    assert not dist.is_initialized()
    assert Agreement.over(None, timedelta(seconds=5)) is None


@pytest.mark.usefixtures("one_rank")
def test_an_exchange_with_oneself() -> None:
    agreement = Agreement(None, timedelta(seconds=10))
    agreement.exchange(Verdict("restore", "v", 1))
    with pytest.raises(PeerRankError, match="rank 0 cannot restore 'v':\n  rank 0: because"):
        agreement.exchange(Verdict("restore", "v", 1, "because"))
    agreement.close()
    agreement.close()


@pytest.mark.usefixtures("one_rank")
def test_closing_after_the_program_has_ended_its_groups() -> None:
    agreement = Agreement(None, timedelta(seconds=10))
    dist.destroy_process_group()
    agreement.close()
