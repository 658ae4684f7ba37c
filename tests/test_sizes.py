"""Sizes as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardsnap.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4097, 4097),
        ("17", 17),
        ("17B", 17),
        ("48GiB", 48 << 30),
        ("48G", 48 << 30),
        ("48GB", 48 * 10**9),
        (" 1.5 KiB ", 1536),
        ("0.5TB", 5 * 10**11),
        ("512M", 512 << 20),
    ],
)
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 lightyear", "1e9", "1gib", "1 GiB 2", "1.GiB", -1, True, 1.5, None]
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 << 20, "1.50 GiB"), (5 << 40, "5.00 TiB")],
)
def test_sizes_are_written(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_what_is_written_is_read_back_to_half_a_percent(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= 0.005 * nbytes
