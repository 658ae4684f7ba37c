"""Order on real streams: what a save sees, what a restore overwrites, and when."""

from __future__ import annotations

import pytest
import torch

from shardsnap import SnapshotService
from tests.gpu.device import DEVICE, SECONDS, Marked, gpu, keep_busy, needs_streams, synchronize, values

pytestmark = [*gpu, needs_streams]


def test_a_save_sees_what_its_stream_has_yet_to_write() -> None:
    model = Marked()
    side = torch.cuda.Stream(DEVICE)
    in_flight = False
    with SnapshotService(model, snapshots=2) as service:
        for index in range(1, 4):
            side.wait_stream(torch.cuda.current_stream(DEVICE))
            with torch.cuda.stream(side):
                keep_busy()
                model.mark(index)
                ticket = service.save("v")
            in_flight |= not ticket.done()
            ticket.wait(SECONDS)
            synchronize()
            model.mark(-1)
            service.restore("v")
            assert model.values() == {index}
    assert in_flight, "every save blocked the host until the writes before it were done"


def test_a_write_after_a_save_does_not_reach_the_snapshot() -> None:
    model = Marked()
    with SnapshotService(model, snapshots=2) as service:
        for index in range(1, 6):
            model.mark(index)
            service.save("v")
            model.mark(-index)  # the stream has to hold this back until the copies have read
            assert model.values() == {-index}
            service.restore("v")
            assert model.values() == {index}


def test_a_write_on_another_stream_waits_where_it_is_told_to() -> None:
    """fence() holds back a stream that is not the one that saved."""
    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    side = torch.cuda.Stream(DEVICE)
    with SnapshotService(model, snapshots=2) as service:
        service.guard(optimizer)
        for index in range(1, 6):
            model.mark(index)
            service.save("v", fence="optimizer")
            with torch.cuda.stream(side):
                service.fence()
                model.mark(-index)
            torch.cuda.current_stream(DEVICE).wait_stream(side)
            service.restore("v")
            assert model.values() == {index}


def test_a_restore_that_does_not_wait_is_in_the_order_of_its_stream() -> None:
    """Work before it reads the old weights, work after it the restored ones, and the host waits for neither."""
    model = Marked()
    side = torch.cuda.Stream(DEVICE)
    with SnapshotService(model, snapshots=2) as service:
        model.mark(7)
        service.save("v").wait(SECONDS)
        in_flight = 0
        for stream in (torch.cuda.current_stream(DEVICE), side):
            for index in range(1, 4):
                synchronize()
                with torch.cuda.stream(stream):
                    model.mark(index)
                    keep_busy()
                    before = model.copies()
                    service.restore("v", wait=False)
                    in_flight += service.stats().copies_in_flight
                    after = model.copies()
                    model.mark(-index)
                    last = model.copies()
                synchronize()
                assert (values(before), values(after), values(last)) == ({index}, {7}, {-index})
    assert in_flight, "every restore blocked the host until the work before it was done"


def test_a_restore_on_one_stream_waits_for_the_save_on_another() -> None:
    model = Marked()
    saving, restoring = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    with SnapshotService(model, snapshots=2) as service:
        for index in range(1, 5):
            synchronize()
            with torch.cuda.stream(saving):
                keep_busy()
                model.mark(index)
                service.save("v")
                model.mark(-1)
            with torch.cuda.stream(restoring):
                restoring.wait_stream(saving)
                service.restore("v", wait=False)
                found = model.copies()
            synchronize()
            assert values(found) == {index}


@pytest.mark.parametrize("priority", [0, -1])
def test_compute_goes_on_beside_a_save_for_the_optimizer(priority: int) -> None:
    """Kernels on other streams that only read the weights give what they give alone."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2048, 2048, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    inputs = torch.randn(256, 2048, device=DEVICE)
    side = torch.cuda.Stream(DEVICE, priority=priority)
    with SnapshotService(model, snapshots=2) as service, torch.no_grad():
        service.guard(optimizer)
        expected = model(inputs)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        for _ in range(10):
            service.save("v", fence="optimizer")
            with torch.cuda.stream(side):
                found = model(inputs)
            synchronize()
            assert torch.equal(found, expected)
