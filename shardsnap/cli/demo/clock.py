"""Seconds and bytes per verb, of calls that all ranks make together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Call:
    """One call on one rank: seconds until the bytes had arrived, and how many they were."""

    seconds: float
    nbytes: int


class Clock:
    """Times calls from a common start: every rank is there and its device idle, before and after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.calls: dict[str, list[Call]] = {}

    def time(self, verb: str, call: Callable[[], int]) -> None:
        """Make ``call``, which returns the bytes that it moved, and note it under ``verb``."""
        self._settle()
        dist.barrier()
        self._settle()
        started = time.perf_counter()
        nbytes = call()
        self._settle()
        self.calls.setdefault(verb, []).append(Call(time.perf_counter() - started, nbytes))

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
