"""A layout: which bytes a model's weights are, under which names. It knows nothing of the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Region:
    """One contiguous run of device bytes.

    Attributes:
        name: what a person would call it: a parameter's name, or an FSDP1 unit's with ``(flat shard)`` behind it.
        unit: the FSDP group that gathers it, or "" outside FSDP.
        device: where the bytes are.
        address: of the first byte.
        nbytes: at least 1; a name without bytes has an entry and no region.
    """

    name: str
    unit: str
    device: torch.device
    address: int
    nbytes: int


@dataclass(frozen=True)
class Entry:
    """One named parameter or buffer, as far as this rank holds it.

    Attributes:
        name: without wrapper prefixes. Two names of one tied weight are two entries over the same bytes.
        kind: "parameter" or "buffer".
        shape: the whole, unsharded shape.
        dtype: of the stored values.
        placement: which part this rank holds, as text that is equal exactly where the part is: "" for a whole tensor,
            "elements [100, 300)" of the flattened parameter for FSDP1, placements, mesh and coordinate for a DTensor.
        local_shape, local_stride: of the local tensor, in elements; (n,) and (1,) inside an FSDP1 flat shard.
        region: index into Layout.regions, or -1 where this rank holds no bytes of it.
        offset: bytes from the start of the region.
        nbytes: bytes of this entry that this rank holds.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]
    region: int
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The ordered regions of a model and the entries inside them, at one moment.

    Attributes:
        kind: "plain", "fsdp1(use_orig_params=True)", "fsdp1(use_orig_params=False)" or "fsdp2".
        regions: in the model's order; they do not overlap.
        entries: in the model's order; names are unique.
        owners: the tensors whose storage the regions are, kept alive as long as the layout.
        versioned: the tensors whose autograd version counter an in-place write must bump.
        local_tensors: per entry, the local tensor (empty where region is -1), for writes that need a conversion.
    """

    kind: str
    regions: tuple[Region, ...]
    entries: tuple[Entry, ...]
    owners: Sequence[torch.Tensor] = field(repr=False)
    versioned: Sequence[torch.Tensor] = field(repr=False)
    local_tensors: Sequence[torch.Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all regions: what one snapshot holds on this rank."""
        return sum(region.nbytes for region in self.regions)
