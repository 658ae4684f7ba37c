"""The device that these tests use, and why they are left out where it is not there.

SHARDSNAP_GPU_TESTS_DEVICE=cpu runs what needs no streams on the CPU, or on the emulated driver where SHARDSNAP_BACKEND
and SHARDSNAP_LIBCUDA say so: that tests the tests, not the GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from tests.layout import reading
from tests.reference import Kept, named_tensors

DEVICE_VARIABLE = "SHARDSNAP_GPU_TESTS_DEVICE"
DEVICE = torch.device(os.environ.get(DEVICE_VARIABLE, "cuda:0"))
ON_GPU = DEVICE.type == "cuda"

SECONDS = 60
"""After which a copy counts as lost."""

BUSY_CYCLES = 200_000_000
"""Clock cycles of a kernel that does nothing: about 0.1 s."""

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ON_GPU and not torch.cuda.is_available(), reason=f"needs a CUDA device, and torch {torch.__version__} sees none"
    ),
]
needs_streams = pytest.mark.skipif(not ON_GPU, reason="the host is the stream on a CPU")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in the order of its shape, wherever it is."""
    return reading.bytes_of(tensor.detach().cpu())


def kept(model: nn.Module) -> dict[str, Kept]:
    """As tests.reference.kept, of a model on any device."""
    return {name: Kept(t.dtype, tuple(t.shape), bytes_of(t)) for name, t in named_tensors(model).items()}


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in named_tensors(model).items()}


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize(DEVICE)


def keep_busy() -> None:
    """Put work on the current stream that takes long: what comes later must wait for it, the host must not."""
    if ON_GPU:
        torch.cuda._sleep(BUSY_CYCLES)


class Marked(nn.Module):
    """Large weights, all of one value: a torn snapshot has two."""

    def __init__(self, parts: int = 4, elements: int = 16 << 20 if ON_GPU else 1 << 20) -> None:
        super().__init__()
        weights = (nn.Parameter(torch.zeros(elements, device=DEVICE)) for _ in range(parts))
        self.weights = nn.ParameterList(weights)

    def mark(self, value: float) -> None:
        """Enqueues the writes on the current stream."""
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(value)

    def copies(self) -> list[torch.Tensor]:
        """Copies made on the current stream."""
        return [weight.detach().clone() for weight in self.weights]

    def values(self) -> set[float]:
        """The least and greatest value of every weight."""
        return values(self.copies())


def values(tensors: list[torch.Tensor]) -> set[float]:
    return {float(value) for tensor in tensors for value in tensor.aminmax()}
