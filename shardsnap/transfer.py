"""From layouts to copy plans: where each region lies in a snapshot, and which bytes a restore moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardsnap import _C
from shardsnap.device import chunk_bytes
from shardsnap.layout import Entry, Layout, Region
from shardsnap.matching import Match

_EXTENT_ALIGNMENT = 4096


@dataclass(frozen=True)
class DevicePart:
    """The copies of a plan that one device makes; host offsets count from byte ``base`` of the extent."""

    device: torch.device
    plan: _C.CopyPlan
    base: int


@dataclass(frozen=True, eq=False)
class SnapshotPlan:
    """How the snapshots of one layout lie in their extent.

    Attributes:
        layout: without its tensors, so that a snapshot does not keep a replaced model alive.
        offsets: per region, bytes from the start of the extent.
        parts: the copies, per device.
        nbytes: bytes that a save moves.
        extent_bytes: bytes that a snapshot takes from the arena.
    """

    layout: Layout
    offsets: tuple[int, ...]
    parts: tuple[DevicePart, ...]
    nbytes: int
    extent_bytes: int

    def offset_of(self, entry: Entry) -> int:
        """Bytes from the start of the extent to the first byte of ``entry``, which has bytes."""
        return self.offsets[entry.region] + entry.offset


@dataclass(frozen=True, eq=False)
class RestorePlan:
    """Which bytes of a snapshot go where.

    Attributes:
        parts: the copies, per device.
        conversions: (saved index, live index) of the entries that differ in dtype or strides, for Tensor.copy_.
        nbytes: bytes that the parts and the conversions write.
        restored, converted: the names, as in RestoreReport.
    """

    parts: tuple[DevicePart, ...]
    conversions: tuple[tuple[int, int], ...]
    nbytes: int
    restored: tuple[str, ...]
    converted: tuple[str, ...]


def plan_snapshots(layout: Layout) -> SnapshotPlan:
    """Lay out the snapshots of ``layout``: devices one after the other, regions by address."""
    offsets = np.zeros(len(layout.regions), dtype=np.uint64)
    parts: list[DevicePart] = []
    base = 0
    for device in dict.fromkeys(region.device for region in layout.regions):
        chosen = [index for index, region in enumerate(layout.regions) if region.device == device]
        addresses, sizes = _addresses_and_sizes([layout.regions[index] for index in chosen])
        packed, packed_bytes = _C.pack_regions(addresses, sizes)
        plan = _C.CopyPlan(addresses, packed, sizes, chunk_bytes=chunk_bytes(device))
        offsets[chosen] = packed + np.uint64(base)
        parts.append(DevicePart(device, plan, base))
        base = _round_up(base + packed_bytes)
    return SnapshotPlan(
        layout=layout.without_tensors(),
        offsets=tuple(int(offset) for offset in offsets),
        parts=tuple(parts),
        nbytes=layout.nbytes,
        extent_bytes=base,
    )


def plan_restore(saved: SnapshotPlan, live: Layout, match: Match) -> RestorePlan:
    """The copies that bring the matched part of a snapshot into the live weights."""
    restored = tuple(live.entries[live_index].name for _, live_index in match.pairs)
    if match.exact:
        ranges = zip(live.regions, saved.offsets, strict=True)
        parts = _restore_parts((region.device, region.address, offset, region.nbytes) for region, offset in ranges)
        return RestorePlan(parts, (), live.nbytes, restored, ())
    moved: list[tuple[torch.device, int, int, int]] = []
    conversions: list[tuple[int, int]] = []
    nbytes = 0
    for saved_index, live_index in match.pairs:
        saved_entry, live_entry = saved.layout.entries[saved_index], live.entries[live_index]
        if live_entry.nbytes == 0:
            continue
        nbytes += live_entry.nbytes
        if _same_bytes(saved_entry, live_entry):
            region = live.regions[live_entry.region]
            address = region.address + live_entry.offset
            moved.append((region.device, address, saved.offset_of(saved_entry), live_entry.nbytes))
        else:
            conversions.append((saved_index, live_index))
    other_dtype = {difference.name for difference in match.differences if difference.kind == "dtype"}
    converted = tuple(name for name in restored if name in other_dtype)
    return RestorePlan(_restore_parts(moved), tuple(conversions), nbytes, restored, converted)


def host_tensor(extent: _C.Extent, plan: SnapshotPlan, entry: Entry) -> torch.Tensor:
    """The saved value of ``entry``: a CPU tensor that reads the extent in place and keeps it alive."""
    itemsize = entry.dtype.itemsize
    start = plan.offset_of(entry)
    raw = torch.frombuffer(extent, dtype=torch.uint8, count=entry.nbytes, offset=start)
    if start % itemsize != 0:
        raw = raw.clone()  # a view needs its first byte aligned; only an unaligned live tensor is saved unaligned
    return raw.view(entry.dtype).as_strided(entry.local_shape, entry.local_stride)


def _same_bytes(saved: Entry, live: Entry) -> bool:
    return saved.dtype == live.dtype and saved.local_stride == live.local_stride


def _restore_parts(ranges: Iterable[tuple[torch.device, int, int, int]]) -> tuple[DevicePart, ...]:
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for device, address, offset, nbytes in ranges:
        by_device.setdefault(device, []).append((address, offset, nbytes))
    return tuple(
        DevicePart(
            device,
            _C.CopyPlan(*np.array(rows, dtype=np.uint64).T, chunk_bytes=chunk_bytes(device)),
            base=0,
        )
        for device, rows in by_device.items()
    )


def _addresses_and_sizes(regions: Sequence[Region]) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], ...]:
    addresses = np.fromiter((region.address for region in regions), dtype=np.uint64, count=len(regions))
    sizes = np.fromiter((region.nbytes for region in regions), dtype=np.uint64, count=len(regions))
    return addresses, sizes


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _EXTENT_ALIGNMENT) * _EXTENT_ALIGNMENT
