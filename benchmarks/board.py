"""What a run has found, collected for the tables at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.race import Lap


@dataclass(frozen=True)
class LapTable:
    """One race.

    Attributes:
        title: what was done.
        nbytes: moved by each path, or 0 where the question is not how many.
        laps: the subject first.
    """

    title: str
    nbytes: int
    laps: Sequence[Lap]

    def as_json(self) -> dict[str, Any]:
        """For a benchmark's extra_info."""
        return {
            lap.name: {
                "median_seconds": lap.seconds,
                "gb_per_second": self.nbytes / lap.seconds / 1e9 if self.nbytes else None,
                "time_over_the_first": lap.ratio,
            }
            for lap in self.laps
        }


@dataclass(frozen=True)
class Crossing:
    """memcpy against non-temporal stores.

    Attributes:
        threads: that share a copy.
        rows: bytes of the copy, GB/s with memcpy, GB/s with non-temporal stores.
        nbytes: the size from which on non-temporal stores are never slower; None where there is none.
    """

    threads: int
    rows: Sequence[tuple[int, float, float]]
    nbytes: int | None


@dataclass(frozen=True)
class Target:
    """A number that the project has promised itself.

    Attributes:
        name: what is measured.
        value, bound: what came out, and what it must be at least or at most.
        unit: behind both numbers.
        sense: which of the two.
    """

    name: str
    value: float
    sense: Literal[">=", "<="]
    bound: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.value >= self.bound if self.sense == ">=" else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        """For a benchmark's extra_info."""
        return {"name": self.name, "value": self.value, "target": f"{self.sense} {self.bound:g}{self.unit}"}


@dataclass(frozen=True)
class Board:
    """Everything that the tables show, in the order of the run."""

    races: list[LapTable] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)

    def record(self, benchmark: BenchmarkFixture, race: LapTable, targets: Sequence[Target] = ()) -> None:
        """Keep a race and its targets, here and in the benchmark's extra_info."""
        self.races.append(race)
        self.targets.extend(targets)
        benchmark.extra_info["paths"] = race.as_json()
        benchmark.extra_info["targets"] = [target.as_json() for target in targets]
