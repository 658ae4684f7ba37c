"""Copy plans: where bytes lie in a snapshot, and which of them a restore moves."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from shardsnap import _C
from shardsnap.layout import Layout, layout_of
from shardsnap.matching import match_layouts
from shardsnap.transfer import SnapshotPlan, host_tensor, plan_restore, plan_snapshots
from tests.layout.reading import bytes_of
from tests.reference import bag, kept, named_tensors, scramble


def save_by_hand(layout: Layout, plan: SnapshotPlan) -> _C.Extent:
    """What the engine does, region by region."""
    extent = _C.Arena(None, capacity=plan.extent_bytes, pin="never").allocate(plan.extent_bytes)
    for region, offset in zip(layout.regions, plan.offsets, strict=True):
        ctypes.memmove(extent.address + offset, region.address, region.nbytes)
    return extent


@settings(deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=8), st.integers(0, 63))
def test_snapshots_waste_little_and_regions_do_not_overlap(sizes: list[int], start: int) -> None:
    base = torch.zeros(start + sum(sizes) + 100 * len(sizes), dtype=torch.uint8)
    tensors, position = {}, start
    for index, size in enumerate(sizes):
        tensors[f"t{index}"] = base[position : position + size]
        position += size + (index % 3) * 50
    model = bag(**tensors)
    layout = layout_of(model)
    plan = plan_snapshots(layout)
    spans = sorted((offset, offset + r.nbytes) for offset, r in zip(plan.offsets, layout.regions, strict=True))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert plan.nbytes == sum(sizes) == sum(part.plan.bytes for part in plan.parts)
    assert plan.extent_bytes % 4096 == 0
    end = max((end for _, end in spans), default=0)
    assert end <= plan.extent_bytes < end + 4096
    assert end <= plan.nbytes + 64 * (len(sizes) + 1)
    for region, offset in zip(layout.regions, plan.offsets, strict=True):
        assert (region.address - offset) % 16 == (layout.regions[0].address - plan.offsets[0]) % 16


def test_a_plan_does_not_hold_the_model() -> None:
    plan = plan_snapshots(layout_of(bag(a=torch.ones(3))))
    assert (plan.layout.anchors, plan.layout.marked) == ((), ())


def test_touching_regions_are_one_copy() -> None:
    base = torch.ones(300)
    plan = plan_snapshots(layout_of(bag(a=base[:100], b=base[100:], c=base[50:150])))
    assert [part.plan.copies for part in plan.parts] == [1]


def test_a_model_without_bytes() -> None:
    model = bag(a=torch.empty(0))
    layout = layout_of(model)
    plan = plan_snapshots(layout)
    assert (plan.parts, plan.nbytes, plan.extent_bytes) == ((), 0, 0)
    restore = plan_restore(plan, layout, match_layouts(plan.layout, layout))
    assert (restore.parts, restore.restored) == ((), ("a",))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex128])
def test_saved_values_are_read_in_place(dtype: torch.dtype) -> None:
    values = torch.arange(60).remainder(2).to(dtype).reshape(3, 4, 5)
    model = bag(pad=torch.ones(3, dtype=torch.int8), x=values.clone().permute(2, 0, 1), none=torch.ones(()).to(dtype))
    layout = layout_of(model)
    plan = plan_snapshots(layout)
    extent = save_by_hand(layout, plan)
    before = named_tensors(model)
    for entry in plan.layout.entries:
        saved = host_tensor(extent, plan, entry)
        assert (saved.dtype, saved.shape) == (before[entry.name].dtype, before[entry.name].shape)
        assert saved.stride() == before[entry.name].stride()
        assert bytes_of(saved) == bytes_of(before[entry.name])
    saved = host_tensor(extent, plan, plan.layout.entries[1])
    scramble(model)
    del extent, plan, layout
    assert bytes_of(saved) == bytes_of(values.permute(2, 0, 1))  # it keeps its memory alive


def test_an_unaligned_saved_value_is_read_right() -> None:
    raw = bytearray(range(100))
    model = bag(
        a=torch.frombuffer(raw, dtype=torch.float64, count=5, offset=3),
        b=torch.frombuffer(raw, dtype=torch.int32, count=7, offset=51),
    )
    layout = layout_of(model)
    plan = plan_snapshots(layout)
    extent = save_by_hand(layout, plan)
    for entry, tensor in zip(plan.layout.entries, (model.a, model.b), strict=True):
        assert bytes_of(host_tensor(extent, plan, entry)) == bytes_of(tensor)


def test_a_restore_moves_what_fits_and_converts_the_rest() -> None:
    saved_layout = layout_of(bag(a=torch.ones(10), b=torch.ones(4, 5), c=torch.ones(3), d=torch.ones(7)))
    saved = plan_snapshots(saved_layout)
    model = bag(d=torch.ones(7), b=torch.ones(5, 4).t(), a=torch.ones(10, dtype=torch.int16), new=torch.ones(1))
    live = layout_of(model)
    plan = plan_restore(saved, live, match_layouts(saved.layout, live))
    assert plan.restored == ("d", "b", "a")
    assert plan.converted == ("a",)
    assert plan.conversions == ((1, 1), (0, 2))
    assert [part.plan.bytes for part in plan.parts] == [28]
    assert plan.nbytes == 28 + 80 + 20


def test_an_exact_restore_is_whole_regions() -> None:
    model = nn.Sequential(*(nn.Linear(3, 4) for _ in range(5)))
    layout = layout_of(model)
    saved = plan_snapshots(layout)
    plan = plan_restore(saved, layout, match_layouts(saved.layout, layout))
    assert plan.conversions == ()
    assert plan.nbytes == saved.nbytes == sum(part.plan.bytes for part in plan.parts)
    assert plan.restored == tuple(kept(model))
