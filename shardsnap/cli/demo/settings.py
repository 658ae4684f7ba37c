"""What a run of the demo does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Wrapper(str, Enum):
    """How the model is sharded."""

    FSDP1_ORIGINAL = "fsdp1"
    FSDP1_FLAT = "fsdp1-flat"
    FSDP2 = "fsdp2"

    @property
    def label(self) -> str:
        """The wrapper in torch's own words."""
        return {
            Wrapper.FSDP1_ORIGINAL: "FSDP1, use_orig_params=True",
            Wrapper.FSDP1_FLAT: "FSDP1, use_orig_params=False",
            Wrapper.FSDP2: "FSDP2 (fully_shard)",
        }[self]


class Model(str, Enum):
    """Which architecture of transformers."""

    QWEN3 = "qwen3"
    LLAMA = "llama"


class Dtype(str, Enum):
    """Compute precision; the weights that are kept and trained are fp32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        ranks: processes, each with a shard of the model.
        device_type: "cpu", or "cuda" with one GPU per rank.
        wrappers: which of them, in order.
        model, layers, hidden_size: the transformer.
        dtype: compute precision.
        cycles: parameter-sync cycles; pi_old is taken at the start of each.
        mini_batches: optimizer steps per cycle.
        sequences: per mini-batch and rank.
        sequence_bytes: tokens per sequence, one per byte of text.
        inject_difference: flip one weight bit after a restore by shardsnap, to show that the checks see it.
    """

    ranks: int
    device_type: str
    wrappers: tuple[Wrapper, ...]
    model: Model
    layers: int
    hidden_size: int
    dtype: Dtype
    cycles: int
    mini_batches: int
    sequences: int = 4
    sequence_bytes: int = 64
    inject_difference: bool = False
