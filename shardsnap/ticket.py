"""A ticket: a save in flight, as its caller sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shardsnap import _C
from shardsnap.errors import CopyError
from shardsnap.generations import Version

_FOR_EVER = 1e9  # seconds; much more does not fit the clocks of the core


class Ticket:
    """A save that may still be in flight. It keeps the memory of the copy alive until the copy has ended.

    Attributes:
        version: the key that was saved.
        generation: which save of that version this is on this rank, from 1 on.
        nbytes: bytes that the save moves.
    """

    def __init__(
        self, version: Version, generation: int, copies: Sequence[_C.Ticket], weights: Sequence[torch.UntypedStorage]
    ) -> None:
        self.version = version
        self.generation = generation
        self.nbytes = sum(copy.bytes for copy in copies)
        self._copies = copies
        self._weights = weights

    def done(self) -> bool:
        """True once the save has ended, well or badly. Does not block."""
        ended = all(copy.done() for copy in self._copies)
        if ended:
            self._weights = []
        return ended

    def wait(self, timeout: float | None = None) -> None:
        """Block the host until the save is done; KeyboardInterrupt comes through and leaves the copy running.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: the save is still in flight after ``timeout`` seconds.
            CopyError: the save failed; the version that it would have replaced is still there.
        """
        deadline = None if timeout is None or timeout > _FOR_EVER else time.monotonic() + timeout
        for copy in self._copies:
            if not copy.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the save of {self.version!r} is still in flight after {timeout} s")
        self._weights = []

    @property
    def error(self) -> CopyError | None:
        """Why the save failed, once that is known; None before, and when it succeeded. Does not block."""
        for copy in self._copies:
            reason = copy.error()
            if reason is not None:
                return CopyError(f"the save of {self.version!r} (generation {self.generation}) failed: {reason}")
        return None

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done() else "in flight"
        return f"Ticket(version={self.version!r}, generation={self.generation}, nbytes={self.nbytes}, {state})"
