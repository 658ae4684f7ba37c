"""Reads a layout as the engine does, by address alone, so that a test compares bytes, not tensors with themselves."""

from __future__ import annotations

import ctypes

import torch

from shardsnap.layout import Entry, Layout


def region_bytes(layout: Layout) -> list[bytes]:
    """The bytes of every region."""
    return [ctypes.string_at(region.address, region.nbytes) for region in layout.regions]


def write_regions(layout: Layout, saved: list[bytes]) -> None:
    """Puts saved bytes back where the regions are."""
    for region, data in zip(layout.regions, saved, strict=True):
        assert len(data) == region.nbytes
        ctypes.memmove(region.address, data, region.nbytes)


def entry_bytes(layout: Layout, entry: Entry) -> bytes:
    """The bytes of one entry, b"" where this rank holds none."""
    if entry.region < 0:
        assert entry.nbytes == 0
        return b""
    region = layout.regions[entry.region]
    assert entry.offset >= 0
    assert entry.offset + entry.nbytes <= region.nbytes
    return ctypes.string_at(region.address + entry.offset, entry.nbytes)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in the order of its shape."""
    # numpy() makes a storage that cannot be resized any more, which FSDP needs: never of the tensor itself.
    return bytes(
        tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def by_name(layout: Layout) -> dict[str, Entry]:
    return {entry.name: entry for entry in layout.entries}
