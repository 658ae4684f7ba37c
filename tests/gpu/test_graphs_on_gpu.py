"""CUDA graphs: a captured forward reads restored weights, and no copy is ever captured."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardsnap import SnapshotService, UnsafeStateError
from tests.gpu.device import DEVICE, SECONDS, addresses, gpu, kept, needs_streams, synchronize

pytestmark = [*gpu, needs_streams]


class Captured:
    """A forward as a CUDA graph; `during` is called while its stream captures."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).to(DEVICE)
        self._inputs = torch.randn(32, 256, device=DEVICE)
        self._during = during
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> None:
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.no_grad():
            with torch.cuda.stream(side):  # libraries make their handles before the capture
                for _ in range(3):
                    self.model(self._inputs)
            torch.cuda.current_stream(DEVICE).wait_stream(side)
            with torch.cuda.graph(self._graph):
                self._output = self.model(self._inputs)
                self._during()

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._output.clone()

    def move(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(value)


def test_a_captured_forward_reads_restored_weights() -> None:
    captured = Captured()
    captured.capture()
    with SnapshotService(captured.model, snapshots=2) as service:
        where, saved = addresses(captured.model), kept(captured.model)
        old = captured.replay()
        service.save("old")
        captured.move(0.5)
        new = captured.replay()
        assert not torch.equal(new, old)
        service.save("new")
        for version, expected in (("old", old), ("new", new), ("old", old)):
            service.restore(version, wait=version == "new")
            assert torch.equal(captured.replay(), expected), version
        assert kept(captured.model) == saved
        assert addresses(captured.model) == where


@pytest.mark.parametrize("settled", [True, False], ids=["settled", "not asked for yet"])
def test_verbs_are_refused_during_a_capture(settled: bool) -> None:
    """And the capture goes on: asking whether an earlier save is done must not end it, nor count it as failed."""
    refused: list[str] = []

    def attempt() -> None:
        for verb in (lambda: service.save("inside"), lambda: service.restore("old")):
            try:
                verb()
            except Exception as error:
                refused.append(type(error).__name__)

    captured = Captured(attempt)
    with SnapshotService(captured.model, snapshots=3) as service:
        saved = kept(captured.model)
        ticket = service.save("old")
        if settled:
            ticket.wait(SECONDS)
        captured.capture()
        assert refused == [UnsafeStateError.__name__] * 2
        assert ticket.error is None
        before = captured.replay()
        captured.move(1.0)
        service.restore("old")
        assert kept(captured.model) == saved
        assert torch.equal(captured.replay(), before)
        assert service.versions() == ("old",)


def test_a_thread_may_ask_for_a_ticket_while_another_one_captures() -> None:
    answers: list[bool] = []

    def ask() -> None:
        thread = threading.Thread(target=lambda: answers.append(ticket.done()))
        thread.start()
        thread.join(SECONDS)

    captured = Captured(ask)
    with SnapshotService(captured.model, snapshots=2) as service:
        saved = kept(captured.model)
        ticket = service.save("old")
        captured.capture()
        synchronize()
        assert ticket.error is None
        assert ticket.done()
        assert len(answers) == 1
        captured.move(1.0)
        service.restore("old")
        assert kept(captured.model) == saved
