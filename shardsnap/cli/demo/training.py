"""The cycles of decoupled PPO: per mini-batch, old_log_prob under pi_old, then one PPO step of the live weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardsnap.cli.demo.batches import mini_batch, read_text
from shardsnap.cli.demo.old_policy import OldPolicy
from shardsnap.cli.demo.settings import Settings

_LEARNING_RATE = 1e-3
_CLIP = 0.2


@dataclass
class Trained:
    """What a run computed.

    Attributes:
        tensors: by name, on the CPU: every old_log_prob of this rank, and at the end every whole weight.
        moved: mini-batches in which the live weights no longer gave old_log_prob.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: int = 0


def train(model: nn.Module, old_policy: OldPolicy, settings: Settings, device: torch.device) -> Trained:
    """Train ``model`` for all cycles, with pi_old seen through ``old_policy``."""
    text = read_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    trained = Trained()
    for cycle in range(settings.cycles):
        for index in range(settings.mini_batches):
            batch = mini_batch(text, settings, cycle * settings.mini_batches + index, dist.get_rank(), device)

            with old_policy.weights(index) as policy, torch.no_grad():
                old_log_prob = log_prob(policy, batch.tokens)

            live_log_prob = log_prob(model, batch.tokens)
            ratio = torch.exp(live_log_prob - old_log_prob)
            clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
            loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

            trained.tensors[f"old_log_prob of cycle {cycle}, mini-batch {index}"] = old_log_prob.cpu()
            trained.moved += not torch.equal(old_log_prob, live_log_prob.detach())

    for name, weight in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items():
        assert isinstance(weight, torch.Tensor)
        trained.tensors[name] = weight.detach().cpu()
    return trained


def log_prob(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of every byte, given those before it: float32, [sequences, bytes - 1]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)
