"""Paths that do the same work, run in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_benchmark.fixture import BenchmarkFixture

WARM_UP_ROUNDS = 1


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Path:
    """One way of doing the work.

    Attributes:
        name: of the path, as the tables have it.
        run: what is timed.
        before, after: what is not: bring about the state of a run in the middle of many, and check the outcome.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], None] = _nothing
    after: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Lap:
    """How one path did.

    Attributes:
        name: of the path.
        seconds: the median over the rounds.
        ratio: by how much the subject was faster: the median of the quotients within each round.
    """

    name: str
    seconds: float
    ratio: float


def race(benchmark: BenchmarkFixture, subject: Path, others: Sequence[Path], rounds: int) -> list[Lap]:
    """Run every path once a round, first the others and then the subject, which the benchmark times as well.

    Returns:
        The subject first, then the others in their order.
    """
    seconds: dict[str, list[float]] = {path.name: [] for path in (subject, *others)}

    def timed(path: Path) -> None:
        started = time.perf_counter()
        path.run()
        seconds[path.name].append(time.perf_counter() - started)

    def run_others() -> None:
        for path in others:
            path.before()
            timed(path)
            path.after()
        subject.before()

    benchmark.pedantic(  # type: ignore[no-untyped-call]
        timed,
        args=(subject,),
        setup=run_others,
        teardown=lambda _: subject.after(),
        rounds=rounds,
        warmup_rounds=WARM_UP_ROUNDS,
    )
    kept = {name: all_rounds[WARM_UP_ROUNDS:] or all_rounds for name, all_rounds in seconds.items()}
    return [_lap(name, kept[name], kept[subject.name]) for name in kept]


def _lap(name: str, seconds: Sequence[float], of_subject: Sequence[float]) -> Lap:
    ratios = [one / other for one, other in zip(seconds, of_subject, strict=True)]
    return Lap(name, statistics.median(seconds), statistics.median(ratios))


def ratio_to(laps: Sequence[Lap], name: str) -> float:
    """By how much the subject was faster than the path of that name."""
    return next(lap.ratio for lap in laps if lap.name == name)
