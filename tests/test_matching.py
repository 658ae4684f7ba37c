"""What fits into what, on layouts alone."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardsnap import LayoutMismatchError
from shardsnap.layout import Layout, layout_of
from shardsnap.matching import Difference, Match, match_layouts, mismatch_error
from tests.reference import bag


def layout(**tensors: torch.Tensor) -> Layout:
    return layout_of(bag(**tensors))


def found(match: Match) -> list[tuple[str, str]]:
    return [(difference.name, difference.kind) for difference in match.differences]


def test_the_same_model_elsewhere_is_exact() -> None:
    saved, live = (layout(a=torch.ones(3, 2).t(), b=torch.ones(2, dtype=torch.int8)) for _ in range(2))
    assert match_layouts(saved, live) == Match(True, ((0, 0), (1, 1)), ())


def test_another_order_is_not_exact_but_differs_in_nothing() -> None:
    match = match_layouts(layout(a=torch.ones(3), b=torch.ones(2)), layout(b=torch.ones(2), a=torch.ones(3)))
    assert match == Match(False, ((1, 0), (0, 1)), ())


def test_differences_are_in_the_live_order_and_say_both_sides() -> None:
    saved = layout(gone=torch.ones(1), a=torch.ones(2), b=torch.ones(2, 2))
    live = layout(new=torch.ones(1), b=torch.ones(4, dtype=torch.int64), a=torch.ones(2, dtype=torch.float64))
    match = match_layouts(saved, live)
    assert found(match) == [("new", "missing"), ("b", "shape"), ("b", "dtype"), ("a", "dtype"), ("gone", "unexpected")]
    assert match.pairs == ((1, 2),)
    assert [difference.name for difference in match.skipped] == ["new", "b", "gone"]
    assert str(match.differences[1]) == "b: saved with shape (2, 2), live (4,)"
    assert str(match.differences[3]) == "a: saved as torch.float32, live torch.float64"


def test_another_placement_and_another_wrapper() -> None:
    saved = layout(a=torch.ones(4))
    part = replace(saved.entries[0], placement="elements [0, 4)", shape=(8,))
    sharded = replace(saved, kind="fsdp2", entries=(part,))
    other = replace(sharded, entries=(replace(part, placement="elements [4, 8)"),))
    match = match_layouts(sharded, other)
    assert found(match) == [("a", "placement")]
    assert match.pairs == ()
    detail = "saved as elements [0, 4) with local shape (4,), live elements [4, 8) with local shape (4,)"
    assert match.differences[0].detail == detail
    match = match_layouts(saved, replace(saved, kind="fsdp2"))
    assert found(match) == [("", "layout")]
    assert str(match.differences[0]) == "saved from plain, the live model is fsdp2"
    assert match.skipped == ()
    assert match.pairs == ((0, 0),)


def test_regions_of_another_size_are_not_exact() -> None:
    saved = layout(a=torch.ones(4))
    padded = replace(saved, regions=(replace(saved.regions[0], nbytes=32),))
    assert not match_layouts(saved, padded).exact


def test_tied_weights() -> None:
    one, other = torch.ones(3), torch.ones(3)
    together, apart = layout(a=one, b=one), layout(a=one, b=other)
    assert match_layouts(together, together).exact
    match = match_layouts(together, apart)
    assert (match.differences, match.pairs) == ((), ((0, 0), (1, 1)))
    match = match_layouts(apart, together)
    assert found(match) == [("b", "tied")]
    assert match.pairs == ((0, 0),)
    narrow = torch.ones(3, dtype=torch.bfloat16)
    assert found(match_layouts(together, layout(a=narrow, b=narrow))) == [("a", "dtype"), ("b", "dtype")]


def test_views_that_overlap_otherwise_than_in_the_snapshot() -> None:
    base = torch.arange(10.0)
    saved = layout(a=base[:6], b=base[2:8], c=base[8:])
    assert match_layouts(saved, layout(x=torch.ones(1), a=base[:6], b=base[2:8], c=base[8:])).pairs == (
        (0, 1),
        (1, 2),
        (2, 3),
    )
    assert found(match_layouts(saved, layout(a=base[:6], b=base[3:9], c=base[8:]))) == [("b", "tied")]
    assert found(match_layouts(saved, layout(c=base[:2], b=base[2:8], a=base[:6]))) == [("a", "tied")]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=6), st.data())
def test_what_is_paired_never_writes_two_values_to_one_byte(spans: list[tuple[int, int]], data: st.DataObject) -> None:
    saved_base, live_base = torch.zeros(30), torch.zeros(30)
    starts = [data.draw(st.sampled_from([start, data.draw(st.integers(0, 20))])) for start, _ in spans]
    saved = layout(**{f"t{i}": saved_base[s : s + n] for i, (s, (_, n)) in enumerate(zip(starts, spans, strict=True))})
    live = layout(**{f"t{i}": live_base[s : s + n] for i, (s, n) in enumerate(spans)})
    match = match_layouts(saved, live)
    source: dict[int, int] = {}
    for saved_index, live_index in match.pairs:
        start, elements = spans[live_index]
        for element in range(elements):
            origin = starts[saved_index] + element
            assert source.setdefault(start + element, origin) == origin
    if starts == [start for start, _ in spans]:
        assert match.differences == ()


def test_the_error_lists_all_and_says_what_to_do() -> None:
    differences = [Difference("a", "missing", "one"), Difference("", "layout", "two")]
    error = mismatch_error("v", differences)
    assert isinstance(error, LayoutMismatchError)
    assert isinstance(error, ValueError)
    assert str(error).splitlines()[:3] == [
        "the snapshot 'v' does not fit the live model; 2 difference(s):",
        "  a: one",
        "  two",
    ]


@pytest.mark.parametrize("kind", ["dtype", "layout"])
def test_what_is_converted_is_not_skipped(kind: str) -> None:
    match = Match(False, (), (Difference("a", kind, ""), Difference("b", "shape", "")))  # type: ignore[arg-type]
    assert [difference.name for difference in match.skipped] == ["b"]
