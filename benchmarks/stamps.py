"""A mark in the weights that is another one every round: a copy that did not happen cannot pass for one that did."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stamp(tensors: Sequence[torch.Tensor], mark: float) -> None:
    """Write ``mark`` into the first element of each tensor, into the middle and near the end."""
    for tensor in tensors:
        _marked(tensor).fill_(mark)


def check_stamp(tensors: Sequence[torch.Tensor], mark: float, what: str) -> None:
    """Assert that each tensor has ``mark`` where stamp() puts it."""
    for index, tensor in enumerate(tensors):
        assert bool((_marked(tensor) == mark).all()), f"{what}: tensor {index} does not hold mark {mark}"


def check_equal(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    """Assert that every element is the expected one."""
    for index, (tensor, other) in enumerate(zip(tensors, expected, strict=True)):
        assert torch.equal(tensor, other), f"{what}: tensor {index} differs"


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    step = max(1, (flat.numel() - 1) // 2)
    return flat[::step]
