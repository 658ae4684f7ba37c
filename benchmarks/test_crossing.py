"""From which size on a copy is better made with non-temporal stores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.board import Board, Crossing
from benchmarks.floor import Block, Floor
from benchmarks.settings import Settings

_SIZES = [(64 << 10) << power for power in range(11)]  # 64 KiB to 64 MiB
_LEAST_BYTES = 128 << 20  # a measurement copies at least this much
_ROUNDS = 5


def test_crossing(benchmark: BenchmarkFixture, settings: Settings, board: Board) -> None:
    crossings: list[Crossing] = []

    def measure() -> None:
        crossings.extend(_crossing(threads) for threads in sorted({1, settings.threads}))

    benchmark.pedantic(measure, rounds=1)  # type: ignore[no-untyped-call]
    for crossing in crossings:
        benchmark.extra_info[f"threads={crossing.threads}"] = {
            "never_slower_from_bytes": crossing.nbytes,
            "rows_of_bytes_memcpy_gb_per_second_non_temporal_gb_per_second": crossing.rows,
        }
    board.crossings.extend(crossings)


def _crossing(threads: int) -> Crossing:
    with Floor(threads) as floor, _block(_SIZES[-1]) as to, _block(_SIZES[-1]) as source:
        rows = [(nbytes, *_rates(floor, to, source, nbytes)) for nbytes in _SIZES]
    return Crossing(threads, rows, _never_slower_from(rows))


@contextmanager
def _block(nbytes: int) -> Iterator[Block]:
    block = Block(nbytes)
    try:
        yield block
    finally:
        block.close()


def _rates(floor: Floor, to: Block, source: Block, nbytes: int) -> tuple[float, float]:
    """GB/s with memcpy and with non-temporal stores, in turns."""
    repeats = -(-_LEAST_BYTES // nbytes)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for streaming in rates:
            started = time.perf_counter()
            floor.repeat(to, source, nbytes, repeats, streaming=streaming)
            rates[streaming].append(nbytes * repeats / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates[False]), statistics.median(rates[True])


def _never_slower_from(rows: Sequence[tuple[int, float, float]]) -> int | None:
    """The smallest size from which on non-temporal stores win at every size."""
    found = None
    for nbytes, memcpy, streaming in reversed(rows):
        if streaming < memcpy:
            break
        found = nbytes
    return found
