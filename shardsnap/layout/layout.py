"""A layout: which bytes a model's weights are, under which names. It knows nothing of the arena."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

TensorRef = Callable[[], torch.Tensor | None]


def reference_to(tensor: torch.Tensor) -> TensorRef:
    """Return a weak reference to `tensor`, but a strong one to a parameter.

    ``module.to`` moves a DTensor parameter with torch.utils.swap_tensors, which refuses a tensor with a weak reference.
    A strong one costs nothing: a parameter that has moved is the same object over other bytes.
    """
    return (lambda: tensor) if isinstance(tensor, nn.Parameter) else weakref.ref(tensor)


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
        anchors: per region, the model's own tensor that keeps its storage. Weak where it is not a parameter: a cached
            layout must not keep weights on the device that a trainer has offloaded.
        marked: the tensors whose autograd version counter an in-place write must bump. Weak as well.
    """

    kind: str
    regions: tuple[Region, ...]
    entries: tuple[Entry, ...]
    anchors: Sequence[TensorRef] = field(repr=False)
    marked: Sequence[TensorRef] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all regions: what one snapshot holds on this rank."""
        return sum(region.nbytes for region in self.regions)

    @property
    def versioned(self) -> list[torch.Tensor]:
        """The tensors whose version counter an in-place write must bump, as far as they are alive."""
        return _alive(self.marked)

    def hold(self) -> list[torch.UntypedStorage]:
        """Every region's storage: keep them while a copy is in flight, for a tensor's ``data`` may be replaced."""
        return [tensor.untyped_storage() for tensor in _alive(self.anchors)]

    def local_tensor(self, index: int) -> torch.Tensor:
        """A view of the live bytes of entry ``index``, in its local shape and strides, outside autograd.

        Raises:
            ReferenceError: the tensor is gone; the layout is out of date.
        """
        entry = self.entries[index]
        if entry.nbytes == 0:
            return torch.empty(entry.local_shape, dtype=entry.dtype)
        region, anchor = self.regions[entry.region], self.anchors[entry.region]()
        if anchor is None:
            raise ReferenceError(f"{entry.name}: its tensor is gone, the layout is out of date")
        storage = anchor.untyped_storage()
        start = region.address + entry.offset - storage.data_ptr()
        view = torch.empty(0, dtype=entry.dtype, device=region.device)
        return view.set_(storage, start // entry.dtype.itemsize, entry.local_shape, entry.local_stride)

    def without_tensors(self) -> Layout:
        """The same description with no reference to the model, weak or not."""
        return replace(self, anchors=(), marked=())


def _alive(refs: Sequence[TensorRef]) -> list[torch.Tensor]:
    return [tensor for ref in refs if (tensor := ref()) is not None]
