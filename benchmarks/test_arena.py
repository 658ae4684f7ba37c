"""The price of a service: host memory that is mapped and present before the first save.

A hypervisor may back memory at its first touch, and take pages back that have been free for seconds. So that this is
not what is measured, each way runs twice in a row, and only the second time counts: it finds the pages of the first.
"""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.board import Board, LapTable, Target
from benchmarks.floor import Block
from benchmarks.race import Path, race, ratio_to
from benchmarks.settings import Settings
from shardsnap import _C
from shardsnap.sizes import format_size

_TOUCH = "one thread touches ordinary pages"
_MOST_ROUNDS = 5  # memory that the host has to back again takes seconds


class _ArenaMaker:
    """Makes an arena, and gives it back outside of the timing."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._device = _C.make_cpu_device()
        self._arena: _C.Arena | None = None

    def make(self) -> None:
        self._arena = _C.Arena(self._device, capacity=self._nbytes, pin="never")

    def close(self) -> None:
        assert self._arena is not None
        assert self._arena.stats().mapped == self._nbytes
        self._arena.close()
        self._arena = None


class _Toucher:
    """Makes a block of ordinary pages, and gives it back outside of the timing."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._block: Block | None = None

    def make(self) -> None:
        self._block = Block(self._nbytes, huge_pages=False)

    def close(self) -> None:
        assert self._block is not None
        self._block.close()
        self._block = None


def _warm(name: str, maker: _ArenaMaker | _Toucher) -> Path:
    def make_and_close() -> None:
        maker.make()
        maker.close()

    return Path(name, maker.make, before=make_and_close, after=maker.close)


def test_create(benchmark: BenchmarkFixture, settings: Settings, board: Board) -> None:
    nbytes = 2 * settings.nbytes // 4096 * 4096
    maker, toucher = _ArenaMaker(nbytes), _Toucher(nbytes)
    laps = race(
        benchmark, _warm("shardsnap's arena", maker), [_warm(_TOUCH, toucher)], min(settings.rounds, _MOST_ROUNDS)
    )
    name = f"arena of {format_size(nbytes)}, times as fast as: {_TOUCH}"
    board.record(
        benchmark, LapTable("create an arena", nbytes, laps), [Target(name, ratio_to(laps, _TOUCH), ">=", 3, "x")]
    )
