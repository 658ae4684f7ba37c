"""Which save of a version this is."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest

from shardsnap.generations import _REMEMBERED, Generations, check_version


def test_every_key_counts_for_itself() -> None:
    generations = Generations()
    assert [generations.next(key) for key in ("a", "a", 1, "1", "a", 1)] == [1, 2, 1, 1, 3, 2]


def test_a_forgotten_key_never_gets_a_number_again() -> None:
    generations = Generations()
    for _ in range(5):
        last = generations.next("old")
    for step in range(_REMEMBERED + 10):
        generations.next(step)
    assert generations.next("old") > last
    assert len(generations._tried) == _REMEMBERED


def test_a_key_in_use_is_not_forgotten() -> None:
    generations = Generations()
    for step in range(3 * _REMEMBERED):
        generations.next(step)
        if step % 100 == 0:
            assert generations.next("pi_old") == step // 100 + 1


class Phase(IntEnum):
    FIRST = 1


@pytest.mark.parametrize("version", ["", "v", 0, -7, 1 << 80, Phase.FIRST])
def test_versions(version: Any) -> None:
    assert check_version(version) is version


@pytest.mark.parametrize("version", [True, None, 1.0, b"", [], ("a",)])
def test_other_keys_are_refused(version: Any) -> None:
    with pytest.raises(TypeError, match=f"got {type(version).__name__}"):
        check_version(version)
