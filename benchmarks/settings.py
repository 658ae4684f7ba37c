"""How large a run is, and whether it is large enough to say anything about speed."""

from __future__ import annotations

import os
from dataclasses import dataclass

SIZE_VARIABLE = "SHARDSNAP_BENCH_GIB"
THREADS_VARIABLE = "SHARDSNAP_COPY_THREADS"  # the service reads it as well

_MOST_THREADS = 16  # what the service takes at most by itself


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Attributes:
        gib: size of the uniform workload; the arena that is created is twice as large.
        rounds: how often each path is run after the warm-up.
        threads: copy threads of the floor: as many as the service has.
    """

    gib: float
    rounds: int
    threads: int

    @property
    def judged(self) -> bool:
        """Whether the sizes are out of reach of the caches, so that the targets mean something."""
        return self.gib >= 1.0

    @property
    def nbytes(self) -> int:
        """``gib`` in bytes."""
        return int(self.gib * 2**30)


def read_settings() -> Settings:
    """Settings from the environment.

    Raises:
        ValueError: a variable does not hold a number that makes sense.
    """
    gib = float(os.environ.get(SIZE_VARIABLE, "2"))
    if not 0.01 <= gib <= 1024:
        raise ValueError(f"{SIZE_VARIABLE} must be between 0.01 and 1024, got {gib}")
    usable = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    threads = int(os.environ.get(THREADS_VARIABLE, "0")) or usable
    return Settings(gib=gib, rounds=7 if gib >= 1.0 else 2, threads=threads)
