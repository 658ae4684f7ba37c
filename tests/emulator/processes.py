"""Processes that use the CUDA backend on the emulated driver: one for each set of environment variables.

A process loads its driver once, and the driver reads its settings when it is loaded: they are set before it starts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import CASE_TIMEOUT, RankPool

LIBRARY_VARIABLE = "SHARDSNAP_EMULATOR_LIBRARY"
REPOSITORY = Path(__file__).resolve().parents[2]


def emulator_library() -> str:
    """The emulated driver's path, as `make test` gives it or where it builds it."""
    path = os.environ.get(LIBRARY_VARIABLE)
    if path is None:
        path = str(REPOSITORY / "build/tests/csrc/emulator/libshardsnap_emulated_cuda.so")
    if not Path(path).is_file():
        pytest.fail(f"{path} is not there: `make test` builds the emulated driver, or set {LIBRARY_VARIABLE}", False)
    return path


class Processes:
    """Calls functions by reference, as launch.py does, in processes that live as long as the test session."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, tuple[tuple[str, str | None], ...]], RankPool] = {}

    def run(
        self, world_size: int, environment: dict[str, str | None], function: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        """What ``function(*arguments)`` returned by rank; None in the environment takes a variable away."""
        pool = self._pools.setdefault((world_size, tuple(sorted(environment.items()))), RankPool(world_size))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                if value is None:
                    patch.delenv(name, raising=False)
                else:
                    patch.setenv(name, value)
            return pool.run(function, *arguments, timeout=CASE_TIMEOUT)  # which starts the processes, at first

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@dataclass(frozen=True)
class Emulated:
    """``emulated(function, *arguments, driver=13000)`` runs it in a process whose CPU models are on the emulated GPU.

    Further keywords are settings of the emulated driver: register_result, init_result, devices.
    """

    processes: Processes

    def __call__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        driver: int = 13000,
        library: str | None = None,
        **settings: int,
    ) -> Any:
        return self.on_ranks(1, function, *arguments, driver=driver, library=library, **settings)[0]

    def on_ranks(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        driver: int = 13000,
        library: str | None = None,
        **settings: int,
    ) -> list[Any]:
        environment: dict[str, str | None] = {
            "SHARDSNAP_BACKEND": "cuda",
            "SHARDSNAP_LIBCUDA": library or emulator_library(),
            "SHARDSNAP_EMULATOR_DRIVER_VERSION": str(driver),
        }
        environment |= {f"SHARDSNAP_EMULATOR_{name.upper()}": str(value) for name, value in settings.items()}
        return self.processes.run(world_size, environment, function, *arguments)


class Counts(ctypes.Structure):
    """csrc/emulator/counts.hpp"""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "context_references",
            "streams",
            "events",
            "registrations",
            "orphans",
            "batch_calls",
            "batch_copies",
            "single_copies",
        )
    ]


def emulator_counts() -> dict[str, int]:
    """What the driver of this process counts. Fails where the process has not loaded it."""
    library = ctypes.CDLL(os.environ["SHARDSNAP_LIBCUDA"], mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    counts = Counts()
    library.shardsnap_emulator_counts(ctypes.byref(counts))
    return {name: int(getattr(counts, name)) for name, _ in Counts._fields_}


def live_counts() -> dict[str, int]:
    """What must be zero once every service is closed."""
    counts = emulator_counts()
    return {name: counts[name] for name in ("context_references", "streams", "events", "registrations", "orphans")}


NOTHING_LIVES = dict.fromkeys(("context_references", "streams", "events", "registrations", "orphans"), 0)
