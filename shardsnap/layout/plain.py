"""How a model outside FSDP keeps its bytes: in the parameters and buffers that its modules hold, DTensors included."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import nn

from shardsnap.layout.names import clean_modules, join
from shardsnap.layout.tensors import FlatShard, Piece, piece_of


@dataclass(frozen=True)
class Found:
    """What a room found in a model.

    Attributes:
        kind: as in `Layout`.
        pieces: parameters in the model's order, then buffers.
        managed: (id of module, name) of the parameters that a wrapper registers and takes away as it likes.
        flat_shards: those of FSDP1, also the ones with nothing but padding on this rank.
        holds: whether the wrapper's own objects are still where they were; True where there is no wrapper.
    """

    kind: str
    pieces: list[Piece]
    managed: Collection[tuple[int, str]] = ()
    flat_shards: list[FlatShard] = field(default_factory=list)
    holds: Callable[[], bool] = lambda: True


def find(model: nn.Module, kinds: Collection[str]) -> Found:
    """Return the parameters and buffers of a model without FSDP; every name of a tied weight is a piece.

    Args:
        model: any module, or one that DDP wraps.
        kinds: "parameters", "buffers" or both.
    """
    pieces: list[Piece] = []
    if "parameters" in kinds:
        for path, module in clean_modules(model):
            pieces += module_pieces(path, module, "parameter")
    if "buffers" in kinds:
        pieces += buffer_pieces(model)
    return Found("plain", pieces)


def buffer_pieces(model: nn.Module) -> list[Piece]:
    """Return the buffers of all modules, persistent or not; no wrapper touches them."""
    return [piece for path, module in clean_modules(model) for piece in module_pieces(path, module, "buffer")]


def module_pieces(path: str, module: nn.Module, kind: str) -> list[Piece]:
    """Return the "parameter"s or "buffer"s that one module itself holds."""
    table = module._parameters if kind == "parameter" else module._buffers
    return [piece_of(join(path, name), kind, tensor) for name, tensor in table.items() if tensor is not None]
