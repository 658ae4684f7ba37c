"""How FullyShardedDataParallel keeps a model's bytes: one flat shard per unit. All FSDP1 internals are in this file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardsnap.errors import UnsafeStateError, UnsupportedTensorError
from shardsnap.layout.internals import require
from shardsnap.layout.names import ROOT, clean_modules, join
from shardsnap.layout.plain import Found, buffer_pieces
from shardsnap.layout.tensors import FlatShard, Piece, piece_of
from shardsnap.layout.watch import same_objects

_MODULE_INTERNALS = ("_handle", "training_state", "_use_orig_params")
_HANDLE_INTERNALS = ("flat_param", "uses_sharded_strategy", "_training_state", "_fully_sharded_module", "reshard")
_FLAT_PARAM_INTERNALS = (
    "_shapes",
    "_param_infos",
    "_shared_param_infos",
    "_shard_param_infos",
    "_param_extensions",
    "_params",
    "_shared_params",
)


@dataclass(frozen=True, eq=False)
class Unit:
    """One FSDP wrapper: `name` is its clean path, `handle` its FlatParamHandle, None where it manages no parameter."""

    name: str
    module: FullyShardedDataParallel
    handle: Any


def wraps(model: nn.Module) -> bool:
    """Whether `model` is an FSDP1 module or has one inside."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def units_of(model: nn.Module) -> list[Unit]:
    """Return the FSDP1 units of `model` in its order, each once.

    Raises:
        UnsupportedTorchError: this torch keeps the unit's state elsewhere.
    """
    units: dict[int, Unit] = {}
    for path, module in clean_modules(model):
        if isinstance(module, FullyShardedDataParallel) and id(module) not in units:
            require(module, *_MODULE_INTERNALS)
            handle = module._handle
            if handle is not None:
                require(handle, *_HANDLE_INTERNALS)
                require(handle.flat_param, *_FLAT_PARAM_INTERNALS)
            units[id(module)] = Unit(path or ROOT, module, handle)
    return list(units.values())


def assert_safe(units: Sequence[Unit]) -> None:
    """Check that no unit is inside forward, backward or summon_full_params.

    Raises:
        UnsafeStateError: one is; the message names it and its state.
    """
    for unit in units:
        states = [unit.module.training_state] + ([unit.handle._training_state] if unit.handle is not None else [])
        busy = [state.name for state in states if state.name != "IDLE"]
        if busy:
            raise UnsafeStateError(
                f"FSDP unit {unit.name} is in state {' / '.join(busy)}: its weights must not be read or written inside "
                "forward, backward or summon_full_params (an exception that left one of them leaves this state too)"
            )


def reshard(units: Sequence[Unit]) -> None:
    """Make idle units forget what they gathered, so that the next forward gathers what the shards hold by then.

    FSDP1 keeps a gathered copy after forward under SHARD_GRAD_OP, and always for the root, and does not gather again
    while it has one: a write into the shards would go unseen.
    """
    for unit in units:
        if unit.handle is not None and _keeps_gathered(unit.handle):
            _reshard_unit(unit)


def _keeps_gathered(handle: Any) -> bool:
    """Whether anything made from the shard is allocated, or parameters are views of something else than the shard."""
    flat_param = handle.flat_param
    if not hasattr(flat_param, "_local_shard"):
        return False  # before the first forward there is nothing but the shard
    copies = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
    allocated = any(_storage_nbytes(getattr(flat_param, name, None)) for name in copies)
    return allocated or flat_param.data_ptr() != flat_param._local_shard.data_ptr()


def _reshard_unit(unit: Unit) -> None:
    from torch.distributed.fsdp import _runtime_utils

    require(_runtime_utils, "_reshard")
    state, handle = unit.module, unit.handle
    device = getattr(state, "_device_handle", None)
    if device is not None and getattr(state, "_unshard_stream", None) is not None:
        # A gather that was started ahead of time may still be writing what is freed here.
        device.current_stream().wait_stream(state._unshard_stream)
    _runtime_utils._reshard(state, handle, handle.uses_sharded_strategy)
    # Evaluation in full precision gathers into a second tensor, which the call above leaves alone once training again.
    for name in ("_full_param_padded", "_full_prec_full_param_padded") if handle.uses_sharded_strategy else ():
        leftover: torch.Tensor | None = getattr(handle.flat_param, name, None)
        if leftover is not None and _storage_nbytes(leftover):
            leftover.untyped_storage().resize_(0)


def _storage_nbytes(tensor: torch.Tensor | None) -> int:
    return tensor.untyped_storage().nbytes() if tensor is not None else 0


def find(model: nn.Module, kinds: Collection[str]) -> Found:
    """Return the flat shards of all units with the names inside them, and what FSDP leaves alone as plain tensors.

    Raises:
        UnsafeStateError: original parameters or a shard were replaced and FSDP has not taken them over yet.
        UnsupportedTensorError: units of both use_orig_params, or parameters that an FSDP extension flattened.
    """
    units = units_of(model)
    kind = _kind_of(units)
    paths: dict[int, list[str]] = {}
    order = list(clean_modules(model))
    for path, module in order:
        paths.setdefault(id(module), []).append(path)

    flat_shards: list[FlatShard] = []
    managed: dict[int, list[Piece]] = {}
    names: set[tuple[int, str]] = set()
    if "parameters" in kinds:
        for unit in units:
            if unit.handle is None:
                continue
            shard = local_shard(unit)
            flat = FlatShard(f"{unit.name} (flat shard)", unit.name, shard, _anchor(unit))
            flat_shards.append(flat)
            for owner, name, piece in _pieces_of(unit, flat):
                if id(owner) not in paths:
                    raise UnsafeStateError(
                        f"{unit.name}: a module with parameter {name} was taken out of the model after FSDP wrapped it"
                    )
                managed.setdefault(id(owner), []).append(piece)
                names.add((id(owner), name))

    flat_params = {id(unit.handle.flat_param) for unit in units if unit.handle is not None}
    pieces: list[Piece] = []
    for path, module in order if "parameters" in kinds else ():
        pieces += [_renamed(piece, join(path, piece.name)) for piece in managed.get(id(module), ())]
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in flat_params and (id(module), name) not in names:
                pieces.append(piece_of(join(path, name), "parameter", tensor))
    if "buffers" in kinds:
        pieces += buffer_pieces(model)
    return Found(kind, pieces, names, flat_shards, _Unmoved(units).holds if "parameters" in kinds else lambda: True)


def _kind_of(units: Sequence[Unit]) -> str:
    choices: dict[bool, str] = {}
    for unit in units:
        choices.setdefault(bool(unit.module._use_orig_params), unit.name)
    if len(choices) > 1:
        raise UnsupportedTensorError(
            f"FSDP unit {choices[True]} has use_orig_params=True and {choices[False]} has it False; they must agree"
        )
    return f"fsdp1(use_orig_params={next(iter(choices))})"


def local_shard(unit: Unit) -> torch.Tensor:
    """Return the full-precision flat shard of this rank: 1-D, padding included, on the CPU under CPU offload.

    Raises:
        UnsafeStateError: the flat parameter was moved elsewhere without its shard, or its shard without it.
    """
    flat_param = unit.handle.flat_param
    shard: torch.Tensor | None = getattr(flat_param, "_local_shard", None)
    if shard is None:  # before the first forward
        return flat_param.data  # type: ignore[no-any-return]
    gathered = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
    known = [shard] + [tensor for name in gathered if (tensor := getattr(flat_param, name, None)) is not None]
    if flat_param.data_ptr() not in [tensor.data_ptr() for tensor in known]:
        raise UnsafeStateError(
            f"FSDP unit {unit.name}: the flat parameter was moved (such as by model.to) and no longer is its local "
            "shard; move both (flat_param._local_shard = flat_param.data) or run a forward first"
        )
    return shard.detach()


def _anchor(unit: Unit) -> torch.Tensor:
    """Return the tensor that FSDP itself keeps over the shard; `local_shard` makes a new one at every call."""
    flat_param: torch.Tensor = unit.handle.flat_param
    return getattr(flat_param, "_local_shard", flat_param)


def _pieces_of(unit: Unit, flat: FlatShard) -> list[tuple[nn.Module, str, Piece]]:
    """Return (module, name in it, piece of that name) for every original parameter and every alias of one."""
    flat_param, shard = unit.handle.flat_param, flat.tensor
    found: list[tuple[nn.Module, str, Piece]] = []
    first: dict[tuple[int, str], Piece] = {}
    for index, info in enumerate(flat_param._param_infos):
        if flat_param._param_extensions[index] is not None:
            name = join(unit.name, info.param_name)
            raise UnsupportedTensorError(f"{name}: flattened by an FSDP1 extension (2-D parallelism); use fully_shard")
        held = flat_param._shard_param_infos[index]
        offset, count = (held.offset_in_shard, held.numel_in_shard) if held.in_shard else (0, 0)
        begin = held.intra_param_start_idx if held.in_shard else 0
        local = shard[offset : offset + count]
        original = flat_param._params[index] if flat_param._params is not None else None
        if original is not None and original.data_ptr() != (local.data_ptr() if count else original.data_ptr()):
            raise UnsafeStateError(
                f"{join(unit.name, info.param_name)} was given other data after FSDP wrapped it; FSDP takes it over in "
                "the next forward, until then its shard is out of date"
            )
        grad_of = original if original is not None else flat_param
        piece = Piece(
            name=info.param_name,
            kind="parameter",
            unit=unit.name,
            shape=tuple(flat_param._shapes[index]),
            dtype=shard.dtype,
            placement=f"elements [{begin}, {begin + count})" if count else "elements none",
            seen=original if original is not None else _with_requires_grad(local, grad_of.requires_grad),
            local=local,
            anchor=flat.anchor,
            grad_of=grad_of,
            versioned=(flat_param, flat.anchor) + ((original,) if original is not None else ()),
            flat=flat,
        )
        first[id(info.module), info.param_name] = piece
        found.append((info.module, info.param_name, piece))
    for index, alias in enumerate(flat_param._shared_param_infos):
        piece = first[id(alias.prim_module), alias.prim_param_name]
        if (id(alias.module), alias.param_name) in first:
            continue  # one module in two places: `find` names it once per place anyway
        if flat_param._shared_params is not None:
            shared = flat_param._shared_params[index]
            piece = _with_versioned(piece, (*piece.versioned, shared))
        first[id(alias.module), alias.param_name] = piece
        found.append((alias.module, alias.param_name, _renamed(piece, alias.param_name)))
    return found


def _with_requires_grad(local: torch.Tensor, trainable: bool) -> torch.Tensor:
    """Return a view for a user's predicate that tells the truth about requires_grad."""
    return local.detach().requires_grad_(trainable) if trainable else local


def _renamed(piece: Piece, name: str) -> Piece:
    return replace(piece, name=name)


def _with_versioned(piece: Piece, versioned: tuple[torch.Tensor, ...]) -> Piece:
    return replace(piece, versioned=versioned)


class _Unmoved:
    """Whether the shards and the original parameters of all units are where they were."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [unit for unit in units if unit.handle is not None]
        self._flat_params = [unit.handle.flat_param for unit in self._units]
        self._shards = self._current_shards()
        self._originals = self._current_originals()
        self._original_addresses = list(map(torch.Tensor.data_ptr, self._originals))

    def holds(self) -> bool:
        shards, originals = self._current_shards(), self._current_originals()
        return (
            same_objects([unit.handle.flat_param for unit in self._units], self._flat_params)
            and shards == self._shards
            and same_objects(originals, self._originals)
            and self._original_addresses == list(map(torch.Tensor.data_ptr, originals))
        )

    def _current_shards(self) -> list[tuple[int, int, torch.dtype]]:
        """Return address, number of elements and dtype of every unit's shard."""
        found = []
        for unit in self._units:
            flat_param = unit.handle.flat_param
            try:
                shard = local_shard(unit)
            except UnsafeStateError:
                found.append((0, 0, flat_param.dtype))  # equal to no shard: rebuilding raises it again
                continue
            found.append((shard.data_ptr(), shard.numel(), shard.dtype))
        return found

    def _current_originals(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(p._params for p in self._flat_params if p._params is not None))
