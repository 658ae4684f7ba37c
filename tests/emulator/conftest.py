"""The fixtures that run functions on the emulated driver, or without any driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .processes import Emulated, Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def emulated(processes: Processes) -> Emulated:
    return Emulated(processes)
