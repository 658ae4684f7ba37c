"""Tickets over copies of a fake core, and over real ones."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardsnap import CopyError, SnapshotService, Ticket


class Copy:
    """A copy that is in flight until it is told otherwise."""

    def __init__(self, nbytes: int = 10) -> None:
        self.bytes = nbytes
        self.ended = False
        self.failure: str | None = None
        self.timeouts: list[float | None] = []

    def done(self) -> bool:
        return self.ended

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        if self.ended and self.failure:
            raise CopyError(self.failure)
        return self.ended

    def error(self) -> str | None:
        return self.failure if self.ended else None


def ticket_over(*copies: Copy) -> Ticket:
    return Ticket("pi_old", 3, copies, [torch.ones(1).untyped_storage()])  # type: ignore[arg-type]


def test_a_ticket_is_done_when_all_its_copies_are() -> None:
    copies = Copy(10), Copy(5)
    ticket = ticket_over(*copies)
    assert (ticket.version, ticket.generation, ticket.nbytes) == ("pi_old", 3, 15)
    assert not ticket.done()
    copies[0].ended = True
    assert not ticket.done()
    assert ticket._weights
    assert repr(ticket) == "Ticket(version='pi_old', generation=3, nbytes=15, in flight)"
    with pytest.raises(TimeoutError, match=r"the save of 'pi_old' is still in flight after 0\.5 s"):
        ticket.wait(0.5)
    copies[1].ended = True
    ticket.wait()
    assert not ticket._weights
    assert ticket.done()
    assert ticket.error is None
    assert "done" in repr(ticket)


def test_done_lets_go_of_the_weights() -> None:
    copy = Copy()
    ticket = ticket_over(copy)
    copy.ended = True
    assert ticket.done()
    assert not ticket._weights


def test_a_failed_copy_is_an_error() -> None:
    copies = Copy(), Copy()
    ticket = ticket_over(*copies)
    copies[1].failure = "CUDA_ERROR_X"
    assert ticket.error is None
    for copy in copies:
        copy.ended = True
    assert "failed" in repr(ticket)
    assert str(ticket.error) == "the save of 'pi_old' (generation 3) failed: CUDA_ERROR_X"
    with pytest.raises(CopyError, match="CUDA_ERROR_X"):
        ticket.wait()


def test_all_copies_share_one_timeout() -> None:
    copies = Copy(), Copy()
    copies[0].ended = True
    ticket = ticket_over(*copies)
    with pytest.raises(TimeoutError):
        ticket.wait(5)
    first, second = copies[0].timeouts[0], copies[1].timeouts[0]
    assert first is not None
    assert second is not None
    assert 4 < second <= first <= 5
    with pytest.raises(TimeoutError):
        ticket.wait(-1)
    assert copies[1].timeouts[1] == 0


@pytest.mark.parametrize("timeout", [None, threading.TIMEOUT_MAX, 1e300, float("inf")])
def test_a_very_long_timeout_is_no_timeout(timeout: float | None) -> None:
    copy = Copy()
    copy.ended = True
    ticket_over(copy).wait(timeout)
    assert copy.timeouts == [None]


def test_a_ticket_outlives_its_service() -> None:
    model = nn.Linear(2048, 2048)
    optimizer = torch.optim.SGD(model.parameters())
    with SnapshotService(model, 1) as service:
        service.guard(optimizer)
        ticket = service.save("v", fence="optimizer")
    assert ticket.done()
    ticket.wait(0)
    assert ticket.error is None
