"""Mini-batches out of demo_text.txt: real text, one token per byte, so that no tokenizer has to be fetched."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import torch

from shardsnap.cli.demo.settings import Settings


@dataclass(frozen=True)
class MiniBatch:
    """Sequences of one rank.

    Attributes:
        tokens: int64, [sequences, bytes]; every byte but the first of a sequence counts as an action.
        advantages: float32, [sequences, bytes - 1].
    """

    tokens: torch.Tensor
    advantages: torch.Tensor


def read_text() -> bytes:
    """Return the text without the lines that name its source, which start with #."""
    lines = files("shardsnap.cli").joinpath("demo_text.txt").read_text(encoding="ascii").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#")).encode("ascii")


def mini_batch(text: bytes, settings: Settings, index: int, rank: int, device: torch.device) -> MiniBatch:
    """Cut mini-batch ``index`` of ``rank`` out of ``text``, which starts again at its end."""
    size = settings.sequences * settings.sequence_bytes
    start = (index * settings.ranks + rank) * size
    taken = bytes(text[(start + offset) % len(text)] for offset in range(size))
    tokens = torch.frombuffer(bytearray(taken), dtype=torch.uint8).to(torch.int64).reshape(settings.sequences, -1)
    # A reward that needs no judge: 1 for a byte that is a vowel. Standardised, as PPO's advantages are.
    rewards = torch.isin(tokens[:, 1:], torch.tensor(list(b"aeiouAEIOU"))).float()
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return MiniBatch(tokens.to(device), advantages.to(device))
