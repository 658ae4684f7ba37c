"""Ranks that do not agree: everybody raises, says who and why, no weight has changed, and work goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardsnap import SnapshotService
from tests.distributed import scenarios
from tests.distributed.launch import Ranks
from tests.distributed.scenarios import failure_of, shards
from tests.distributed.test_layout_fsdp1 import wrapped
from tests.distributed.test_layout_fsdp2 import TOKENS, Net, sharded

QUICK = 20.0  # seconds: far from the timeout of a collective, far from what a loaded machine needs


class Session:
    """A model in training with "old" saved, one step before its present weights."""

    def __init__(self, build: scenarios.Build = sharded, capacity: int | str = "64KiB", **options: Any) -> None:
        self.model = build(**options)
        self.optimizer = scenarios.optimizer_of(self.model)
        self.service = SnapshotService(self.model, capacity=capacity, timeout=60)
        self.saved = shards(self.model)
        self.service.save("old")
        self.step()

    def step(self) -> None:
        scenarios.train(self.model, self.optimizer)

    def refused(self, call: Callable[[], object]) -> str:
        """The error of a call that must fail quickly and leave weights and process group as they are."""
        before = shards(self.model)
        assert scenarios.differing(before, self.saved)
        started = time.monotonic()
        message = failure_of(call)
        assert message, "nothing was raised"
        assert time.monotonic() - started < QUICK
        assert shards(self.model) == before
        scenarios.check_group_works()
        return message

    def check_works(self) -> None:
        """Training goes on, and a save comes back on every rank."""
        self.step()
        self.service.save("check")
        expected = shards(self.model)
        self.step()
        output = scenarios.output_of(self.model)
        report = self.service.restore("check")
        assert scenarios.output_of(self.model) != output
        assert shards(self.model) == expected
        assert report.version == "check"
        scenarios.check_group_works()
        self.service.close()


def one_rank_lost_a_parameter() -> str:
    session = Session()
    ignored = session.model.ignored
    if dist.get_rank() == 1:
        del session.model.ignored
    message = failure_of(lambda: session.service.restore("old"))
    if dist.get_rank() == 1:
        session.model.ignored = ignored
    assert scenarios.differing(shards(session.model), session.saved)
    again = session.service.restore("old")
    assert again.skipped == ()
    assert shards(session.model) == session.saved
    session.check_works()
    return message


def test_only_one_rank_lost_a_parameter(run_ranks: Ranks) -> None:
    first, second = run_ranks(2, one_rank_lost_a_parameter)
    assert first.startswith("PeerRankError: rank 1 cannot restore 'old'")
    assert "LayoutMismatchError" in first
    assert "ignored: in the snapshot, not in the live model" in first
    assert second.startswith("LayoutMismatchError")
    assert "ignored: in the snapshot, not in the live model" in second


def one_rank_dropped(original: bool | None) -> str:
    """`original` as FSDP1's use_orig_params, or None for FSDP2."""
    session = Session() if original is None else Session(wrapped, strategy="FULL_SHARD", original=original)
    if dist.get_rank() == 1:
        session.service.drop("old")
    message = session.refused(lambda: session.service.restore("old"))
    session.check_works()
    return message


@pytest.mark.parametrize("original", [None, False, True])
def test_only_one_rank_dropped_the_version(run_ranks: Ranks, original: bool | None) -> None:
    first, second = run_ranks(2, one_rank_dropped, original)
    assert first.startswith("PeerRankError: rank 1 cannot restore 'old'")
    assert "UnknownVersionError: no snapshot 'old' is held" in first
    assert second == "UnknownVersionError: no snapshot 'old' is held; held versions: none"


def nobody_holds_it() -> str:
    session = Session()
    message = session.refused(lambda: session.service.restore("new"))
    assert failure_of(lambda: session.service.drop("new")).startswith("UnknownVersionError")
    session.check_works()
    return message


def test_an_unknown_version(run_ranks: Ranks) -> None:
    for message in run_ranks(2, nobody_holds_it):
        assert message == "UnknownVersionError: no snapshot 'new' is held; held versions: 'old'"


def one_rank_inside_forward(build: scenarios.Build) -> str:
    """Rank 1 restores from a hook of the last layer, whose gathers are over; rank 0 after the same forward."""
    session = Session(build)
    messages: list[str] = []

    def restore(*_: object) -> None:
        messages.append(failure_of(lambda: session.service.restore("old")))

    if dist.get_rank() == 1:
        handle = session.model.head.register_forward_hook(restore)
    before = shards(session.model)
    output = session.model(TOKENS)
    if dist.get_rank() == 0:
        restore()  # between forward and backward, where it may
    else:
        handle.remove()
    output.square().mean().backward()
    assert shards(session.model) == before
    session.optimizer.zero_grad()
    session.check_works()
    return messages[0]


def whole_net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("build", [sharded, whole_net])
def test_only_one_rank_is_inside_forward(run_ranks: Ranks, build: scenarios.Build) -> None:
    first, second = run_ranks(2, one_rank_inside_forward, build)
    assert first.startswith("PeerRankError: rank 1 cannot restore 'old'")
    assert "UnsafeStateError: " in first
    assert "forward" in first
    assert second.startswith("UnsafeStateError: ")


def extent_bytes() -> int:
    """What one snapshot takes; ranks differ."""
    with SnapshotService(sharded(), snapshots=1) as service:
        return service.stats().arena.mapped


def one_rank_has_no_room() -> tuple[str, str, int, int]:
    room = extent_bytes()
    session = Session(capacity=(4 if dist.get_rank() == 0 else 2) * room)
    service = session.service
    service.save("other")
    session.step()
    failure = failure_of(lambda: service.save("old"))
    mixed = session.refused(lambda: service.restore("old"))
    generations = [held.generation for held in service.stats().versions if held.version == "old"]
    again = session.refused(lambda: service.restore("old", wait=False))
    assert again == mixed

    service.drop("other")
    ticket = service.save("old")
    expected = shards(session.model)
    session.step()
    report = service.restore("old")
    assert shards(session.model) == expected
    assert report.generation == ticket.generation
    if dist.get_rank() == 0:
        assert failure == ""
        failure = mixed
    session.service.drop("old")
    session.check_works()
    return failure, mixed, generations[0], ticket.generation


def test_saves_of_different_generations_are_never_mixed(run_ranks: Ranks) -> None:
    (_, first, *numbers), (failure, second, *other_numbers) = run_ranks(2, one_rank_has_no_room)
    assert failure.startswith("ArenaFullError: no room to save 'old'")
    assert first == second
    assert first.startswith("PeerRankError: the ranks hold different saves of 'old'")
    assert "rank 0 holds generation 2, rank 1 holds generation 1. rank 1 missed a later save" in first
    assert (numbers, other_numbers) == ([2, 3], [1, 3])


def missed_drop_and_save() -> str:
    session = Session()
    service = session.service
    if dist.get_rank() == 0:
        service.drop("old")
        service.save("old")
    message = session.refused(lambda: service.restore("old"))
    service.drop("old")
    session.step()
    assert failure_of(lambda: service.restore("old")).startswith("UnknownVersionError")
    session.check_works()
    return message


def test_a_rank_that_missed_a_drop_and_a_save(run_ranks: Ranks) -> None:
    first, second = run_ranks(2, missed_drop_and_save)
    assert first == second
    assert "rank 0 holds generation 2, rank 1 holds generation 1. rank 1 missed a later save" in first


def missed_drop_only() -> int:
    """The saves are the same ones, whatever was dropped before."""
    session = Session()
    if dist.get_rank() == 0:
        session.service.drop("old")
    session.service.save("old")
    expected = shards(session.model)
    session.step()
    generation = session.service.restore("old").generation
    assert shards(session.model) == expected
    session.check_works()
    return generation


def test_a_rank_that_missed_only_a_drop(run_ranks: Ranks) -> None:
    assert run_ranks(2, missed_drop_only) == [2, 2]


def different_versions(versions: tuple[Any, Any]) -> str:
    session = Session()
    for version in versions:
        session.service.save(version)
    session.service.drop("old")
    session.step()
    message = session.refused(lambda: session.service.restore(versions[dist.get_rank()]))
    for version in versions:
        session.service.drop(version)
    session.check_works()
    return message


def different_waits() -> str:
    session = Session()
    return session.refused(lambda: session.service.restore("old", wait=dist.get_rank() == 0))


def test_ranks_that_differ_in_whether_they_wait(run_ranks: Ranks) -> None:
    for message in run_ranks(2, different_waits):
        assert message.startswith(
            "PeerRankError: the ranks do not do the same: rank 0 restore 'old', rank 1 restore (w"
        )


@pytest.mark.parametrize("versions", [("a", "b"), (1, "1")])
def test_ranks_that_restore_different_versions(run_ranks: Ranks, versions: tuple[Any, Any]) -> None:
    one, other = versions
    for message in run_ranks(2, different_versions, versions):
        assert message.startswith("PeerRankError: the ranks do not do the same")
        assert f"rank 0 restore {one!r}, rank 1 restore {other!r}" in message


def construction(arguments: list[dict[str, Any]]) -> str:
    model = sharded()
    started = time.monotonic()
    message = failure_of(lambda: SnapshotService(model, **arguments[dist.get_rank()]))
    assert time.monotonic() - started < QUICK
    scenarios.check_group_works()
    Session().check_works()
    return message


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"capacity": "1TiB"}, "ArenaFullError: "),
        ({"capacity": "much"}, "ValueError: "),
        ({"select": ["nothing*"]}, "ValueError: select"),
    ],
)
def test_construction_fails_on_every_rank(run_ranks: Ranks, bad: dict[str, Any], reason: str) -> None:
    first, second = run_ranks(2, construction, [{}, bad])
    assert first.startswith(f"PeerRankError: rank 1 cannot create a service:\n  rank 1: {reason}")
    assert second.startswith(reason)


def alone() -> list[int]:
    """Rank 1 restores twice while rank 0 does nothing at all, then both go on."""
    session = Session()
    if dist.get_rank() == 1:
        for wait in (True, False):
            scenarios.overwrite(session.model)
            assert scenarios.differing(shards(session.model), session.saved)
            session.service.restore("old", wait=wait, agree=False)
            assert shards(session.model) == session.saved
    else:
        assert scenarios.differing(shards(session.model), session.saved)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(counts, torch.tensor([session.service.stats().restores]))
    session.service.restore("old")  # pairs with the same call of the other rank, not with one from before
    assert shards(session.model) == session.saved
    session.check_works()
    return [int(count) for count in counts]


def test_without_agreement_no_rank_waits_for_another(run_ranks: Ranks) -> None:
    assert run_ranks(2, alone) == [[0, 2]] * 2


def overwritten_while_read() -> None:
    """A save over the version that a restore may still be reading, and weights that change at once."""
    session = Session()
    service = session.service
    for _ in range(3):
        session.step()
        report = service.restore("old", wait=False)
        ticket = service.save("old")
        scenarios.overwrite(session.model)
        assert ticket.generation == report.generation + 1
        service.restore("old", wait=False)
        assert shards(session.model) == session.saved
    session.check_works()


def test_saving_over_a_version_that_is_being_read(run_ranks: Ranks) -> None:
    run_ranks(2, overwritten_while_read)


def changed_at_once(build: scenarios.Build, options: dict[str, Any]) -> None:
    session = Session(build, **options)
    for version in ("a", "old", "a"):
        session.step()
        expected = shards(session.model)
        session.service.save(version)
        scenarios.overwrite(session.model)
        session.service.restore(version)
        assert shards(session.model) == expected
        session.service.drop(version)
    session.check_works()


@pytest.mark.parametrize("original", [None, False, True])
def test_weights_that_change_right_after_a_save(run_ranks: Ranks, original: bool | None) -> None:
    if original is None:
        run_ranks(2, changed_at_once, sharded, {})
    else:
        run_ranks(2, changed_at_once, wrapped, {"strategy": "FULL_SHARD", "original": original})


def dropped_in_flight() -> tuple[bool, int]:
    """A version that is dropped while its copy runs: the step still waits, and the room comes back."""
    model = nn.Linear(4096, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    in_flight = False
    with SnapshotService(model, snapshots=2) as service:
        service.guard(optimizer)
        for _ in range(4):
            service.save("kept")
            before = model.weight.detach().clone()
            ticket = service.save("gone", fence="optimizer")
            in_flight |= not ticket.done()
            service.drop("gone")
            assert service.versions() == ("kept",)
            optimizer.step()
            ticket.wait(10)
            assert ticket.error is None
            assert not torch.equal(model.weight, before)
            service.restore("kept")
            assert torch.equal(model.weight, before)
            service.drop("kept")
        assert failure_of(lambda: service.restore("gone")).startswith("UnknownVersionError")
        return in_flight, service.stats().arena.used


def test_dropped_while_in_flight(run_ranks: Ranks) -> None:
    answers = run_ranks(2, dropped_in_flight)
    assert any(in_flight for in_flight, _ in answers)
    assert [used for _, used in answers] == [0, 0]


def unguarded() -> str:
    session = Session()
    return session.refused(lambda: session.service.save("old", fence="optimizer"))


def test_an_optimizer_fence_needs_a_guard(run_ranks: Ranks) -> None:
    for message in run_ranks(2, unguarded):
        assert "guard(optimizer)" in message


def copy_failed_on_one_rank(monkey: str) -> str:
    """Rank 1 cannot even enqueue: the barrier at the end tells rank 0, and the next restore mends rank 1."""
    session = Session()
    service = session.service
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "_engine_for", _failing_second(service._engine_for, monkey))
            message = failure_of(lambda: service.restore("old"))
        assert "mixed" in failure_of(lambda: service.save("new"))
    else:
        message = failure_of(lambda: service.restore("old"))
    scenarios.check_group_works()
    service.restore("old")
    assert shards(session.model) == session.saved
    service.drop("old")
    session.check_works()
    return message


def _failing_second(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    """The check before the agreement passes, the copy after it fails."""
    calls = []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(text)
        return function(*arguments)

    return call


def test_a_copy_that_fails_on_one_rank_is_known_to_the_other(run_ranks: Ranks) -> None:
    first, second = run_ranks(2, copy_failed_on_one_rank, "the link is down")
    assert first.startswith("PeerRankError: rank 1 cannot finish restoring 'old'")
    assert "the link is down" in first
    assert second == "OSError: the link is down"
