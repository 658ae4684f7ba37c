"""Whether this thread is inside a forward or a backward right now, for models that have no state to ask."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import nn

from shardsnap.layout.internals import require

# Dynamo may call one without the other; a module's call always has at least one of these frames.
_CALLS = frozenset(
    getattr(nn.Module, name).__code__
    for name in ("_call_impl", "_wrapped_call_impl")
    if hasattr(getattr(nn.Module, name, None), "__code__")
)


def inside_forward(model: nn.Module) -> bool:
    """Whether a caller of this function is a forward of `model` or of one of its submodules, hooks included.

    A forward of a larger module that only contains `model` does not count, nor does a method that is not called through
    ``module(...)``.
    """
    if not _CALLS:
        require(nn.Module, "_call_impl", "_wrapped_call_impl")
    calling: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS:
            calling.add(id(frame.f_locals.get("self")))
        frame = frame.f_back
    # The walk over the modules costs far more than the one over the frames, and is rarely needed.
    return bool(calling) and any(id(module) in calling for module in model.modules())


def inside_backward() -> bool:
    """Whether autograd is running a backward pass on this thread, of whichever model."""
    require(torch._C, "_current_graph_task_id")
    return torch._C._current_graph_task_id() != -1
