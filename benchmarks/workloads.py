"""The models whose weights are copied: what matters of them is how many tensors there are, and how long each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


class Weights(nn.Module):
    """Float32 parameters of the given numbers of elements, in allocations of their own."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        weights = (torch.arange(size, dtype=torch.float32).add_(index) for index, size in enumerate(sizes))
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)

    def tensors(self) -> list[torch.Tensor]:
        """The weights, outside autograd."""
        return [weight.detach() for weight in self.weights]


@dataclass(frozen=True)
class DecoderShape:
    """The numbers in a decoder's config.json that say how long its weights are."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    def parameters(self) -> list[tuple[int, int]]:
        """Rows and columns of every parameter in the model's order; norms have one column.

        Queries and keys have norms of their own, nothing has a bias, and the head is the embedding, as in Qwen3-0.6B.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = [
            *((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)),
            *((self.head_dim, 1), (self.head_dim, 1)),
            *((inner, hidden), (inner, hidden), (hidden, inner)),
            *((hidden, 1), (hidden, 1)),
        ]
        return [(self.vocab_size, hidden), *layer * self.num_hidden_layers, (hidden, 1)]


# https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
QWEN3_0_6B = DecoderShape(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)


def shard_sizes(shape: DecoderShape, ranks: int) -> list[int]:
    """Elements that the first rank holds of every parameter: fully_shard splits the first dimension, rounded up."""
    return [-(-rows // ranks) * columns for rows, columns in shape.parameters()]


def uniform_sizes(nbytes: int, tensors: int) -> list[int]:
    """Elements of float32 tensors of one length that have ``nbytes`` together."""
    return [nbytes // tensors // 4] * tensors
