"""From named tensors to regions and entries: what can be copied bit for bit, and which tensors share bytes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardsnap.errors import UnsupportedTensorError
from shardsnap.layout.layout import Entry, Layout, Region, reference_to


@dataclass(frozen=True)
class Piece:
    """One named tensor as a room found it, before anyone knows which region it is in.

    Attributes:
        name, kind, shape, dtype, placement: as in `Entry`.
        unit: as in `Region`.
        seen: the tensor that a user's predicate gets: the parameter or buffer itself where there is one.
        local: the tensor over the bytes that this rank holds; no elements where it holds none.
        anchor: the model's own tensor that keeps the storage of `local` as long as the model does.
        grad_of: the tensor whose requires_grad says whether it is trained.
        versioned: the tensors whose version counter a write into `local` must bump.
        flat: over the flat shard that holds `local` and is to be copied whole, padding included; None outside of one.
    """

    name: str
    kind: str
    unit: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    seen: torch.Tensor
    local: torch.Tensor
    anchor: torch.Tensor
    grad_of: torch.Tensor
    versioned: tuple[torch.Tensor, ...]
    flat: FlatShard | None = None


@dataclass(frozen=True)
class FlatShard:
    """A run of bytes that is copied as one, whatever the entries inside it cover.

    Attributes:
        name, unit: of its region.
        tensor: 1-D and contiguous, over all of the bytes.
        anchor: as in `Piece`.
    """

    name: str
    unit: str
    tensor: torch.Tensor
    anchor: torch.Tensor


def piece_of(name: str, kind: str, tensor: torch.Tensor, unit: str = "") -> Piece:
    """Return the piece of a tensor or DTensor that is registered as `name`.

    Raises:
        UnsupportedTensorError: its bytes are not what it means, or are not one run; the message names it.
    """
    local, placement = tensor, ""
    versioned: tuple[torch.Tensor, ...] = (tensor,)
    if isinstance(tensor, DTensor):
        local, placement = local_tensor_of(tensor), placement_text(tensor)
        versioned = (tensor, local)
    return Piece(
        name=name,
        kind=kind,
        unit=unit,
        shape=_shape_of(tensor),
        dtype=tensor.dtype,
        placement=placement,
        seen=tensor,
        local=local,
        anchor=local,
        grad_of=tensor,
        versioned=versioned,
    )


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape, or () for a tensor that has none and that `check_copyable` will refuse."""
    return () if nn.parameter.is_lazy(tensor) or tensor.is_nested else tuple(tensor.shape)


def local_tensor_of(tensor: DTensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds: the tensor itself, no autograd edge and no copy."""
    local: torch.Tensor = tensor._local_tensor
    return local


def placement_text(tensor: DTensor) -> str:
    """Return placements, mesh and this rank's place in it, such as ``Shard(dim=0) on mesh dp=2 at (1,)``."""
    mesh = tensor.device_mesh
    placements = ", ".join(repr(placement) for placement in tensor.placements)
    sizes = [str(size) for size in mesh.shape]
    if mesh.mesh_dim_names is not None:
        sizes = [f"{name}={size}" for name, size in zip(mesh.mesh_dim_names, sizes, strict=True)]
    coordinate = mesh.get_coordinate()
    place = "none" if coordinate is None else f"({', '.join(str(index) for index in coordinate)})"
    return f"{placements} on mesh {' x '.join(sizes)} at {place}"


def check_copyable(name: str, tensor: torch.Tensor) -> None:
    """Check that the bytes of a local tensor are one run and are all there is to it.

    Raises:
        UnsupportedTensorError: they are not; the message has the name and the reason.
    """
    reason = _reason_against(tensor)
    if reason:
        raise UnsupportedTensorError(f"{name}: {reason}")


def _reason_against(tensor: torch.Tensor) -> str:
    """Tell why `tensor` cannot be copied bit for bit, or ""."""
    if nn.parameter.is_lazy(tensor):
        return "a lazy parameter without a shape yet; run the model once first"
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        kind = "a fake tensor" if type(tensor).__name__ == "FakeTensor" else "a tensor subclass"
        return f"{kind} ({type(tensor).__module__}.{type(tensor).__qualname__}) may keep more than its own bytes"
    if tensor.is_nested:
        return "a nested tensor has no single shape"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout} is not one run of bytes"
    if tensor.is_quantized:
        return "a quantized tensor keeps scales outside its bytes"
    if tensor.is_meta:
        return "a meta tensor has no bytes; materialize the model first"
    if tensor.is_conj():
        return "lazily conjugated, its bytes are not its values; call resolve_conj first"
    if tensor.is_neg():
        return "lazily negated, its bytes are not its values; call resolve_neg first"
    if hasattr(tensor, "ds_id") and hasattr(tensor, "ds_status"):
        return "partitioned by DeepSpeed ZeRO-3, its bytes are elsewhere"
    if tensor.numel() == 0:
        return ""
    if not _is_dense(tensor):
        return f"shape {tuple(tensor.shape)} with strides {tensor.stride()} has gaps or overlaps itself"
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < end:
        return "its storage has been freed or resized"
    return ""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run without gap or overlap, in whichever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1:
            continue  # its stride is never used
        if stride != expected:
            return False
        expected *= size
    return True


def check_devices(devices: Iterable[tuple[str, torch.device]]) -> None:
    """Check that named tensors are on the host and at most one accelerator.

    Raises:
        UnsupportedTensorError: two accelerators; the message has one name for each, and how many there are.
    """
    names: dict[torch.device, list[str]] = {}
    for name, device in devices:
        if device.type != "cpu":
            names.setdefault(device, []).append(name)
    if len(names) > 1:
        found = "; ".join(f"{device}: {_some(where)}" for device, where in names.items())
        raise UnsupportedTensorError(f"tensors of one model on several devices, {found}")


def _some(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


@dataclass(frozen=True)
class _Run:
    """Bytes that somebody claims: the half-open interval of addresses [start, end) on a device."""

    name: str
    unit: str
    device: torch.device
    start: int
    end: int
    anchor: torch.Tensor


def build_layout(kind: str, pieces: Sequence[Piece], flat_shards: Sequence[FlatShard] = ()) -> Layout:
    """Put the bytes of `pieces`, and all of `flat_shards`, into regions.

    Intervals of bytes that overlap become one region, so tied tensors and views of each other are copied once;
    intervals that only touch stay apart. A region is called after the first interval in it, in the order given.

    Raises:
        UnsupportedTensorError: a tensor that cannot be copied bit for bit, two of one name, or two accelerators.
    """
    _check_unique(pieces)
    for piece in pieces:
        check_copyable(piece.name, piece.local)
    check_devices((piece.name, piece.local.device) for piece in pieces if piece.local.numel())

    runs: list[_Run] = []
    seen_flat: set[int] = set()
    for piece in pieces:
        # The flat shard claims its bytes before its first entry does: the region is then called after the shard.
        if piece.flat is not None and id(piece.flat) not in seen_flat:
            seen_flat.add(id(piece.flat))
            runs.append(_run_of(piece.flat.name, piece.unit, piece.flat.tensor, piece.flat.anchor))
        if piece.local.numel():
            runs.append(_run_of(piece.name, piece.unit, piece.local, piece.anchor))
    # A shard of which this rank holds nothing but padding has no entry that would have brought it.
    runs += [
        _run_of(flat.name, flat.unit, flat.tensor, flat.anchor) for flat in flat_shards if id(flat) not in seen_flat
    ]
    regions, anchors = _merge([run for run in runs if run.end > run.start])

    places = _Places(regions)
    entries = tuple(_entry_of(piece, *places.of(piece.local)) for piece in pieces)
    versioned = {id(tensor): tensor for piece in pieces for tensor in piece.versioned}
    return Layout(
        kind=kind,
        regions=tuple(regions),
        entries=entries,
        anchors=tuple(map(reference_to, anchors)),
        marked=tuple(map(reference_to, versioned.values())),
    )


def _check_unique(pieces: Sequence[Piece]) -> None:
    names: set[str] = set()
    for piece in pieces:
        if piece.name in names:
            raise UnsupportedTensorError(f"{piece.name}: two tensors have this name once wrapper prefixes are left out")
        names.add(piece.name)


def _run_of(name: str, unit: str, tensor: torch.Tensor, anchor: torch.Tensor) -> _Run:
    # Strides are never negative: the address of element 0 is the lowest one, of a permuted tensor too.
    start = tensor.data_ptr()
    return _Run(name, unit, tensor.device, start, start + tensor.numel() * tensor.element_size(), anchor)


def _merge(runs: Sequence[_Run]) -> tuple[list[Region], list[torch.Tensor]]:
    """Return regions in the order of their first run, and the anchor of each."""
    by_address = sorted(range(len(runs)), key=lambda i: (str(runs[i].device), runs[i].start))
    groups: list[list[int]] = []
    end = 0
    for i in by_address:
        run = runs[i]
        if groups and runs[groups[-1][0]].device == run.device and run.start < end:
            groups[-1].append(i)
            end = max(end, run.end)
        else:
            groups.append([i])
            end = run.end
    regions, anchors = [], []
    for group in sorted(groups, key=min):
        first = runs[min(group)]
        _check_one_storage([runs[i] for i in group])
        start = min(runs[i].start for i in group)
        nbytes = max(runs[i].end for i in group) - start
        regions.append(Region(first.name, first.unit, first.device, start, nbytes))
        anchors.append(first.anchor)
    return regions, anchors


def _check_one_storage(runs: Sequence[_Run]) -> None:
    """Check that runs which overlap belong to one storage, so that holding it keeps the bytes of all of them.

    Raises:
        UnsupportedTensorError: they do not, as with two torch.from_numpy of one array; the message has both names.
    """
    first, *others = runs
    for other in others:
        if other.anchor.untyped_storage().data_ptr() != first.anchor.untyped_storage().data_ptr():
            raise UnsupportedTensorError(f"{other.name}: overlaps {first.name} from another storage; make one a view")


class _Places:
    """Finds the region of a tensor by its address."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._starts: dict[torch.device, list[tuple[int, int]]] = {}
        for index, region in enumerate(regions):
            self._starts.setdefault(region.device, []).append((region.address, index))
        for starts in self._starts.values():
            starts.sort()

    def of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return region index and byte offset in it, or (-1, 0) for a tensor without elements."""
        if tensor.numel() == 0:
            return -1, 0
        starts = self._starts[tensor.device]
        address, index = starts[bisect.bisect_right(starts, (tensor.data_ptr(), 1 << 62)) - 1]
        return index, tensor.data_ptr() - address


def _entry_of(piece: Piece, region: int, offset: int) -> Entry:
    local = piece.local
    return Entry(
        name=piece.name,
        kind=piece.kind,
        shape=piece.shape,
        dtype=piece.dtype,
        placement=piece.placement,
        local_shape=tuple(local.shape),
        local_stride=tuple(local.stride()),
        region=region,
        offset=offset,
        nbytes=local.numel() * local.element_size(),
    )
