"""The weights that are copied: as large as asked for, or as the memory of this machine allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.device_check.host_memory import available_bytes
from benchmarks.workloads import DecoderShape, shard_sizes

# https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json
QWEN3_4B = DecoderShape(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
_ITEM_BYTES = 2

# Two snapshots, a pageable copy, a staged copy, one pinned copy that torch may round up to twice as much.
_HOST_COPIES = 6
_HOST_SPARE = 4 << 30
# The weights and what they are compared with; the floor's buffers are smaller.
_DEVICE_COPIES = 3
_DEVICE_SPARE = 6 << 30


@dataclass(frozen=True)
class Size:
    """How much is copied.

    Attributes:
        sizes: elements of each tensor.
        text: for the table.
    """

    sizes: list[int]
    text: str

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(self.sizes) * _ITEM_BYTES


class Bf16Weights(nn.Module):
    """Parameters in allocations of their own, filled with small whole numbers."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(
                torch.empty(size, dtype=torch.bfloat16, device=device).random_(0, 256, generator=generator),
                requires_grad=False,
            )
            for size in sizes
        )

    def tensors(self) -> list[torch.Tensor]:
        """The weights, outside autograd."""
        return [weight.detach() for weight in self.weights]


def choose_size(gib: float, device: torch.device) -> Size:
    """Qwen3-4B, whole or as many ranks' share of it as makes it small enough."""
    wanted = int(gib * 2**30)
    fits = max(_fitting(device), 1 << 20)
    whole = sum(shard_sizes(QWEN3_4B, 1)) * _ITEM_BYTES
    ranks = max(1, math.ceil(whole / min(wanted, fits)))
    sizes = shard_sizes(QWEN3_4B, ranks)
    share = "all of it" if ranks == 1 else f"the share of one of {ranks} ranks"
    nbytes = sum(sizes) * _ITEM_BYTES
    text = f"Qwen3-4B in bf16, {share}: {nbytes / 1e9:.3f} GB in {len(sizes)} tensors"
    if fits < min(wanted, whole):
        text += f" (scaled down: {gib:g} GiB were asked for, and memory is enough for {fits / 2**30:.1f})"
    return Size(sizes, text)


def _fitting(device: torch.device) -> int:
    host = (available_bytes() - _HOST_SPARE) // _HOST_COPIES
    if device.type != "cuda":
        return host // 2
    return min(host, (torch.cuda.mem_get_info(device)[0] - _DEVICE_SPARE) // _DEVICE_COPIES)
