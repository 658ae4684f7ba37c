"""Which kind of model this is, its layout, and whether a layout is still right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardsnap.errors import UnsafeStateError, UnsupportedTensorError
from shardsnap.layout import fsdp1, fsdp2, plain
from shardsnap.layout.forward_guard import inside_backward, inside_forward
from shardsnap.layout.layout import Layout
from shardsnap.layout.plain import Found
from shardsnap.layout.tensors import FlatShard, Piece, build_layout
from shardsnap.layout.watch import Registrations, Tensors, local_tensors

Select = Literal["trainable"] | Sequence[str] | Callable[[str, torch.Tensor], bool] | None

KINDS = ("parameters", "buffers")


def layout_of(model: nn.Module, include: Sequence[str] = KINDS, select: Select = None) -> Layout:
    """Return the layout of `model` as it is now.

    Args:
        model: a plain module, DDP, FSDP1 or FSDP2, compiled or not.
        include: "parameters", "buffers" or both.
        select: which of those: None for all, "trainable" for parameters that require a gradient, a list of glob
            patterns on clean names, or a predicate of clean name and tensor (under FSDP the local part).

    Raises:
        ValueError: an unknown `include` or `select`, or a `select` that matches nothing.
        UnsupportedTensorError: a tensor or a mix of wrappers that cannot be copied bit for bit.
        UnsafeStateError: parameters were replaced behind FSDP's back.
    """
    return LayoutCache(model, include, select).current()


class LayoutCache:
    """The layout of one model, built again only when something has moved.

    Args:
        model, include, select: as in `layout_of`. A predicate is asked when the layout is built and not again while
            nothing moves; "trainable" notices a changed requires_grad.
    """

    def __init__(self, model: nn.Module, include: Sequence[str] = KINDS, select: Select = None) -> None:
        self._model = model
        self._include = _checked_include(include)
        self._select = _checked_select(select)
        self._layout: Layout | None = None
        self._checks: list[Callable[[], bool]] = []
        self._units: _Units | None = None

    def current(self) -> Layout:
        """Return the layout as it is now: the very same object as before if no object, name or address is another.

        Raises:
            what `layout_of` raises.
        """
        if self._layout is None or not all(check() for check in self._checks):
            self.forget()  # a build that raises must not leave the old layout behind
            self._build()
        assert self._layout is not None
        return self._layout

    def forget(self) -> None:
        """Let go of the layout and of the tensors that it keeps alive."""
        self._layout, self._checks, self._units = None, [], None

    def assert_safe(self) -> None:
        """Check as the function `assert_safe` does, without a walk over the model once `current` has been called."""
        _assert_safe(self._model, self._units or _units_of(self._model))

    def prepare_for_write(self) -> None:
        """Do as the function `prepare_for_write`, without a walk over the model once `current` has been called."""
        _prepare_for_write(self._model, self._units or _units_of(self._model))

    def _build(self) -> None:
        found = _find(self._model, self._include)
        pieces, whole = _selected(found, self._select)
        self._layout = build_layout(found.kind, pieces, whole)
        self._units = _units_of(self._model)
        modules = list(self._model.modules())
        free = [piece for piece in pieces if not _is_managed(piece)]
        ordinary = [piece.seen for piece in free if not isinstance(piece.seen, DTensor)]
        sharded = [piece.seen for piece in free if isinstance(piece.seen, DTensor)]
        # "trainable" looks at every parameter: one that is left out now may be wanted later.
        trainable = [piece.grad_of for piece in found.pieces] if self._select == "trainable" else []
        self._checks = [
            Registrations(modules, self._include, found.managed).hold,
            found.holds,
            Tensors(lambda: ordinary, trainable).hold,
            Tensors(lambda: list(map(local_tensors, sharded))).hold,
        ]


def _is_managed(piece: Piece) -> bool:
    return bool(piece.unit)  # the room that found it watches it


def assert_safe(model: nn.Module) -> None:
    """Check that the weights of `model` may be read and written now.

    Raises:
        UnsafeStateError: this thread is inside a forward of the model, a backward, or summon_full_params.
    """
    _assert_safe(model, _units_of(model))


def prepare_for_write(model: nn.Module) -> None:
    """Check as `assert_safe` does, then drop what wrappers have gathered, so that the next forward sees the write.

    Raises:
        UnsafeStateError: as `assert_safe`.
    """
    _prepare_for_write(model, _units_of(model))


_Units = tuple[list[fsdp1.Unit], list[fsdp2.Unit]]


def _units_of(model: nn.Module) -> _Units:
    return fsdp1.units_of(model), fsdp2.units_of(model)


def _assert_safe(model: nn.Module, units: _Units) -> None:
    if inside_backward():
        raise UnsafeStateError("inside a backward pass: weights must not be read or written before it has ended")
    fsdp1.assert_safe(units[0])
    fsdp2.assert_safe(units[1])
    if inside_forward(model):
        raise UnsafeStateError(
            f"inside a forward of {type(model).__name__}: weights must not be read or written before it has ended"
        )


def _prepare_for_write(model: nn.Module, units: _Units) -> None:
    _assert_safe(model, units)
    fsdp1.reshard(units[0])
    fsdp2.reshard(units[1])


def _find(model: nn.Module, include: tuple[str, ...]) -> Found:
    first, second = fsdp1.wraps(model), fsdp2.wraps(model)
    if first and second:
        raise UnsupportedTensorError(
            f"both wrappers in one model: FullyShardedDataParallel around {fsdp1.units_of(model)[0].name} and "
            f"fully_shard on {fsdp2.units_of(model)[0].name}"
        )
    find = fsdp1.find if first else fsdp2.find if second else plain.find
    return find(model, include)


def _checked_include(include: Sequence[str]) -> tuple[str, ...]:
    kinds = (include,) if isinstance(include, str) else tuple(include)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"include has {unknown or 'nothing'}; allowed are {', '.join(map(repr, KINDS))}, or both")
    return kinds


def _checked_select(select: Select) -> Select:
    if select is None or select == "trainable" or callable(select):
        return select
    if isinstance(select, Sequence) and select and not isinstance(select, (str, bytes)):
        patterns = tuple(select)
        if all(isinstance(pattern, str) for pattern in patterns):
            return patterns
    raise ValueError(
        f'select is {select!r}; allowed are None, "trainable", a list of glob patterns, or a callable (name, tensor)'
    )


def _selected(found: Found, select: Select) -> tuple[list[Piece], list[FlatShard]]:
    """Return the pieces that `select` wants, and the flat shards of which it wants every piece."""
    if select is None:
        return found.pieces, found.flat_shards
    chosen = [piece for piece in found.pieces if _wants(select, piece)]
    if not chosen:
        raise ValueError(f"select={select!r} matches none of {len(found.pieces)} names, such as {_examples(found)}")
    kept = {piece.name for piece in chosen}
    split = {id(piece.flat) for piece in found.pieces if piece.flat is not None and piece.name not in kept}
    pieces = [replace(piece, flat=None) if id(piece.flat) in split else piece for piece in chosen]
    return pieces, [flat for flat in found.flat_shards if id(flat) not in split]


def _wants(select: Select, piece: Piece) -> bool:
    if select == "trainable":
        return piece.grad_of.requires_grad and piece.kind == "parameter"
    if callable(select):
        return bool(select(piece.name, piece.seen))
    assert select is not None
    return any(fnmatchcase(piece.name, pattern) for pattern in select)


def _examples(found: Found) -> str:
    return ", ".join(piece.name for piece in found.pieces[:3]) or "none at all"
