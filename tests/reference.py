"""A plain reference for what a restore must give: the bytes of every named tensor, kept apart from the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardsnap import SnapshotService
from tests.layout.reading import bytes_of


@dataclass(frozen=True)
class Kept:
    """One tensor as it was; equal only where every bit is, NaN payloads included."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, every name of a tied one."""
    return {
        **{name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)},
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def kept(model: nn.Module) -> dict[str, Kept]:
    return {name: Kept(t.dtype, tuple(t.shape), bytes_of(t)) for name, t in named_tensors(model).items()}


def places(model: nn.Module) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """Where each tensor is, in which order of elements, and which object it is."""
    return {name: (t.data_ptr(), t.stride(), id(t.untyped_storage())) for name, t in named_tensors(model).items()}


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory, as bytes that can be written."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def scramble(model: nn.Module) -> None:
    """Write other bytes into every tensor, NaNs of all sorts among them."""
    for tensor in named_tensors(model).values():
        if tensor.dtype is torch.bool:
            tensor.logical_not_()
        elif tensor.numel():
            memory(tensor).random_(0, 256)


def values(model: nn.Module) -> set[float]:
    """The least and greatest value of every parameter: one value where all of them are equal."""
    return {float(value) for weight in model.parameters() for value in weight.detach().aminmax()}


def bag(**tensors: torch.Tensor) -> nn.Module:
    """A module with these buffers, or parameters where they are given as such."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def every_verb(service: SnapshotService, optimizer: torch.optim.Optimizer) -> list[Callable[[], object]]:
    """Calls of all verbs but close, on version "v", for states in which none of them may be used."""
    return [
        lambda: service.save("v"),
        lambda: service.restore("v"),
        lambda: service.drop("v"),
        lambda: service.guard(optimizer),
        service.fence,
        service.stats,
        service.versions,
    ]
