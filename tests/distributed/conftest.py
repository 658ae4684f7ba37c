"""The fixture that gives distributed tests their ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .launch import Ranks


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Ranks]:
    """``run_ranks(world_size, function, *arguments, timeout=120)``: what `function` returned on every rank, by rank.

    The processes live as long as the test session; a case that fails, dies or hangs gets the next case fresh ones.
    """
    ranks = Ranks()
    yield ranks
    ranks.close()
