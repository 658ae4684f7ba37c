"""How fully_shard keeps a model's bytes: one sharded DTensor per parameter. All FSDP2 internals are in this file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from shardsnap.errors import UnsafeStateError
from shardsnap.layout.internals import require
from shardsnap.layout.names import ROOT, clean_modules, join
from shardsnap.layout.plain import Found, buffer_pieces
from shardsnap.layout.tensors import Piece, piece_of
from shardsnap.layout.watch import Tensors, local_tensors, same_objects

_STATE_INTERNALS = ("_training_state", "_state_ctx")
_GROUP_INTERNALS = ("fsdp_params", "_training_state", "is_sharded", "reshard", "wait_for_unshard", "_all_gather_result")
_PARAM_INTERNALS = ("sharded_param", "sharded_state", "_module_info")


@dataclass(frozen=True, eq=False)
class Unit:
    """One state of fully_shard: the clean paths of its modules as `name`, and its groups of parameters."""

    name: str
    state: Any
    groups: tuple[Any, ...]


def _state_getter() -> Callable[[nn.Module], Any]:
    """Return the function that gives the FSDPState of a module, or None."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_state
    except ImportError:
        import torch.distributed.fsdp as fsdp

        require(fsdp, "_fully_shard")
        raise
    require(_fsdp_state, "_get_module_fsdp_state")
    return _fsdp_state._get_module_fsdp_state


def wraps(model: nn.Module) -> bool:
    """Whether fully_shard was applied to `model` or to a module inside."""
    return any(map(_state_getter(), model.modules()))


def units_of(model: nn.Module) -> list[Unit]:
    """Return the FSDP2 units of `model` in its order, each once.

    Raises:
        UnsupportedTorchError: this torch keeps a unit's state elsewhere.
    """
    state_of = _state_getter()
    found: dict[int, tuple[Any, list[str]]] = {}
    for path, module in clean_modules(model):
        state = state_of(module)
        if state is not None:
            paths = found.setdefault(id(state), (state, []))[1]
            if (path or ROOT) not in paths:
                paths.append(path or ROOT)
    units = []
    for state, paths in found.values():
        require(state, *_STATE_INTERNALS)
        groups = _groups_of(state)
        for group in groups:
            require(group, *_GROUP_INTERNALS)
        units.append(Unit(", ".join(paths), state, groups))
    return units


def _groups_of(state: Any) -> tuple[Any, ...]:
    """Return the parameter groups of a state: a list in newer torch, one or None in torch 2.6."""
    if hasattr(state, "_fsdp_param_groups"):
        return tuple(state._fsdp_param_groups)
    require(state, "_fsdp_param_group")
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def assert_safe(units: Sequence[Unit]) -> None:
    """Check that no unit is inside forward or backward.

    Raises:
        UnsafeStateError: one is; the message names it and its state.
    """
    for unit in units:
        states = [unit.state._training_state, *(group._training_state for group in unit.groups)]
        busy = [state.name for state in states if state.name != "IDLE"]
        if not busy and getattr(unit.state._state_ctx, "iter_forward_root", None) is not None:
            busy = ["FORWARD of its root"]
        if busy:
            raise UnsafeStateError(
                f"FSDP unit {unit.name} is in state {busy[0]}: its weights must not be read or written inside forward "
                "or backward (an exception that left one of them leaves this state too)"
            )


def reshard(units: Sequence[Unit]) -> None:
    """Make idle units forget what they gathered, so that the next forward gathers what the shards hold by then."""
    for unit in units:
        for group in unit.groups:
            if group._all_gather_result is not None:
                # A gather started ahead of time reads the shards: it has to end, and its result must not be used.
                group.wait_for_unshard()
            if not group.is_sharded:
                group.reshard()


def find(model: nn.Module, kinds: Collection[str]) -> Found:
    """Return the sharded parameters of all units, gathered or not, and what fully_shard leaves alone as plain tensors.

    Raises:
        UnsafeStateError: a parameter was replaced in its module and fully_shard does not know.
    """
    owners: dict[tuple[int, str], tuple[Any, str]] = {}
    sharded: list[Any] = []
    for unit in units_of(model):
        for index, group in enumerate(unit.groups):
            name = unit.name if len(unit.groups) == 1 else f"{unit.name} [{index}]"
            for fsdp_param in group.fsdp_params:
                require(fsdp_param, *_PARAM_INTERNALS)
                sharded.append(fsdp_param)
                for key in _places_of(fsdp_param):
                    owners[key] = (fsdp_param, name)

    pieces: list[Piece] = []
    tables: list[dict[str, Any]] = []
    names: list[str] = []
    expected: list[Any] = []
    for path, module in clean_modules(model) if "parameters" in kinds else ():
        for name, tensor in module._parameters.items():
            if (id(module), name) not in owners:
                if tensor is not None:
                    pieces.append(piece_of(join(path, name), "parameter", tensor))
                continue
            fsdp_param, unit_name = owners[id(module), name]
            if not _is_registered(fsdp_param, tensor):
                raise UnsafeStateError(
                    f"{join(path, name)} was replaced in its module after fully_shard took it over; a gather ignores it"
                )
            pieces.append(_piece_of(join(path, name), fsdp_param, unit_name))
            tables.append(module._parameters)
            names.append(name)
            expected.append(fsdp_param)
    if "buffers" in kinds:
        pieces += buffer_pieces(model)
    unmoved = _Unmoved(sharded, tables, names, expected)
    return Found("fsdp2", pieces, set(owners), holds=unmoved.hold if "parameters" in kinds else lambda: True)


def _places_of(fsdp_param: Any) -> list[tuple[int, str]]:
    """Return (id of module, name) of every place where the parameter is registered, tied ones included."""
    info = fsdp_param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(id(info.module), info.param_name), *((id(module), name) for module, name in shared)]


def _is_registered(fsdp_param: Any, tensor: torch.Tensor | None) -> bool:
    """Whether `tensor` is one of the forms in which FSDP registers the parameter."""
    forms = (getattr(fsdp_param, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param"))
    return tensor is fsdp_param.sharded_param or any(tensor is form for form in forms if form is not None)


def _piece_of(name: str, fsdp_param: Any, unit: str) -> Piece:
    piece = piece_of(name, "parameter", fsdp_param.sharded_param, unit)
    # A graph of an earlier forward holds the gathered parameter, whose version gathering itself does not bump.
    gathered = getattr(fsdp_param, "_unsharded_param", None)
    if gathered is None:
        return piece
    inner = getattr(gathered, "_local_tensor", None)
    return replace(piece, versioned=(*piece.versioned, gathered) + (() if inner is None else (inner,)))


class _Unmoved:
    """Whether the sharded parameters are where they were and their modules hold one of their forms."""

    def __init__(self, sharded: list[Any], tables: list[dict[str, Any]], names: list[str], expected: list[Any]) -> None:
        self._fsdp_params = sharded
        self._tables, self._names, self._expected = tables, names, expected
        self._sharded = list(map(attrgetter("sharded_param"), sharded))
        self._registered = list(map(attrgetter("sharded_param"), expected))
        self._locals = Tensors(lambda: list(map(local_tensors, self._sharded)))
        self._gathered_once = self._count_gathered()

    def hold(self) -> bool:
        return (
            same_objects(list(map(attrgetter("sharded_param"), self._fsdp_params)), self._sharded)
            and self._locals.hold()
            and self._gathered_once == self._count_gathered()
            and self._are_registered()
        )

    def _are_registered(self) -> bool:
        registered = list(map(dict.get, self._tables, self._names))
        if all(map(is_, registered, self._registered)):
            return True
        return all(map(_is_registered, self._expected, registered))  # slower, while some are gathered

    def _count_gathered(self) -> int:
        """Count those gathered before: `versioned` then has one tensor more."""
        return sum(map(hasattr, self._fsdp_params, ["_unsharded_param"] * len(self._fsdp_params)))
