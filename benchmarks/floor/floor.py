"""Threads that only copy, and blocks of memory to copy between, as Python sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

import torch

from benchmarks.floor.library import Piece, load_library

_PIECE_BYTES = 1 << 20  # what a thread takes at a time

Range = tuple[int, int, int]  # to which address, from which, how many bytes


@dataclass(frozen=True)
class Copies:
    """A list of copies in the form that the library takes, made before the clock starts."""

    pieces: ctypes.Array[Piece]

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> Copies:
        """Split ranges into pieces."""
        pieces = [
            Piece(to + done, source + done, min(_PIECE_BYTES, nbytes - done))
            for to, source, nbytes in ranges
            for done in range(0, nbytes, _PIECE_BYTES)
        ]
        return cls((Piece * len(pieces))(*pieces))


class Block:
    """Anonymous memory with every page present.

    Attributes:
        address: of the first byte, aligned to a huge page.
        nbytes: as asked for.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        self._library = load_library()
        self.nbytes = nbytes
        self.address: int = self._library.floor_map(nbytes, huge_pages)
        if not self.address:
            raise MemoryError(f"no memory for a block of {nbytes} bytes")

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """The bytes from ``offset`` on as a tensor of the type and shape of ``like``; not to be used after close()."""
        nbytes = like.numel() * like.element_size()
        raw = (ctypes.c_uint8 * nbytes).from_address(self.address + offset)
        return torch.frombuffer(raw, dtype=like.dtype).view(like.shape)

    def close(self) -> None:
        """Give the memory back."""
        self._library.floor_unmap(self.address, self.nbytes)


class Floor:
    """A team of copying threads.

    Args:
        threads: how many.
    """

    def __init__(self, threads: int) -> None:
        self._library = load_library()
        self._team = self._library.floor_open(threads)

    @property
    def isa(self) -> str:
        """The instruction set of the non-temporal stores."""
        return str(self._library.floor_isa().decode())

    def copy(self, copies: Copies, *, streaming: bool = True) -> None:
        """Make all copies, with non-temporal stores or with memcpy."""
        self._library.floor_copy(self._team, copies.pieces, len(copies.pieces), streaming)

    def repeat(self, to: Block, source: Block, nbytes: int, repeats: int, *, streaming: bool) -> None:
        """Copy the first ``nbytes`` again and again, each thread its own share."""
        self._library.floor_repeat(self._team, to.address, source.address, nbytes, repeats, streaming)

    def __enter__(self) -> Floor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._library.floor_close(self._team)
