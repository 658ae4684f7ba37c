"""Decoupled PPO with shardsnap: old_log_prob under the weights that began the cycle, while the live weights move on.

    torchrun --nproc-per-node 2 examples/decoupled_ppo.py

Runs on the CPU (gloo), or on one GPU per rank. In every mini-batch of a cycle but the first, live weights step aside:
save live, restore pi_old, compute old_log_prob, restore live. A second model that holds pi_old throughout shows that
old_log_prob comes out the same, bit for bit.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardsnap

CYCLES, MINI_BATCHES, CLIP = 2, 4, 0.2
VOCABULARY, WIDTH, LAYERS = 64, 128, 2


class TinyTransformer(nn.Module):
    """A causal language model with tied embeddings and no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of every token, given those before it."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return -F.cross_entropy(self.head(x)[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard ``model`` over all ranks, a unit per layer and one for the rest."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.to(device).layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    """Train for some cycles and compare every old_log_prob."""
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")

    torch.manual_seed(0)  # the same weights on every rank
    initial = TinyTransformer()
    model = sharded(copy.deepcopy(initial), device)
    reference = sharded(copy.deepcopy(initial), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # other data on every rank

    with shardsnap.SnapshotService(model, snapshots=2) as service:
        for cycle in range(CYCLES):
            service.save("pi_old")
            keep_apart(model, reference)
            for mini_batch in range(MINI_BATCHES):
                tokens = torch.randint(VOCABULARY, (4, 32), device=device)
                advantages = torch.randn(4, 31, device=device)

                if mini_batch == 0:  # the live weights are pi_old
                    old_log_prob = log_prob(model, tokens)
                else:
                    service.save("live")
                    service.restore("pi_old")
                    old_log_prob = log_prob(model, tokens)
                    service.restore("live")
                    service.drop("live")
                assert torch.equal(old_log_prob, log_prob(reference, tokens)), (cycle, mini_batch)

                ratio = torch.exp(model(tokens) - old_log_prob)
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                (-torch.minimum(ratio * advantages, clipped * advantages).mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0:
                    away = (ratio.detach() - 1).abs().max().item()
                    print(f"cycle {cycle}, mini-batch {mini_batch}: old_log_prob equal; ratios up to {away:.3f} from 1")
    dist.destroy_process_group()


@torch.no_grad()
def log_prob(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities without a graph."""
    return model(tokens)


@torch.no_grad()
def keep_apart(model: nn.Module, reference: nn.Module) -> None:
    """Copy the weights of ``model`` into ``reference``, shard by shard."""
    for module in (model, reference):
        module.reshard()  # the root stays gathered after a forward without gradients
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.copy_(mine)


if __name__ == "__main__":
    main()
