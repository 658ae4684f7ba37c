"""verl-style helpers and shardsnap behind the three calls that a decoupled-PPO trainer makes.

The verl-style helpers are written afresh from what verl's do, per FSDP version. Every call returns the bytes that this
rank moved, once they are where they should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - its usual name
from torch.distributed.tensor import DTensor

from shardsnap.service import SnapshotService


class Helpers(Protocol):
    """What the trainer calls, by verl's names; ``n`` is the key of a version."""

    def save_model_to_cpu(self, n: int) -> int:
        """Copy the live weights to the host."""

    def restore_model_from_cpu(self, n: int) -> int:
        """Copy them back into the live weights."""

    def clear_cpu_model(self, n: int) -> None:
        """Forget them."""


class VerlStyleFsdp1:
    """One pageable CPU tensor per FSDP unit, new at every save, copied back with copy_."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDP)
        self._root = model
        self._saved: dict[int, list[torch.Tensor]] = {}

    def save_model_to_cpu(self, n: int) -> int:  # noqa: D102 - as in Helpers
        # copy=True: on a CPU model .to("cpu") alone would return the live tensor itself.
        self._saved[n] = [shard.to("cpu", copy=True) for shard in self._shards()]
        return _nbytes(self._saved[n])

    def restore_model_from_cpu(self, n: int) -> int:  # noqa: D102 - as in Helpers
        for shard, saved in zip(self._shards(), self._saved[n], strict=True):
            shard.copy_(saved)
        dist.barrier()
        return _nbytes(self._saved[n])

    def clear_cpu_model(self, n: int) -> None:  # noqa: D102 - as in Helpers
        del self._saved[n]

    def _shards(self) -> Iterator[torch.Tensor]:
        """Yield the flat shard of every unit."""
        for unit in FSDP.fsdp_modules(self._root):
            handle: Any = unit._handle
            shard = getattr(handle.flat_param, "_local_shard", None)
            if shard is None:  # before the first forward the flat parameter is the shard
                yield handle.flat_param.detach()
                continue
            # The root stays gathered after a no_grad forward, and would not gather again after a restore.
            if unit is self._root and handle.uses_sharded_strategy:
                handle.reshard(True)
            yield shard.detach()


class VerlStyleFsdp2:
    """One pageable CPU tensor per parameter, new at every save, copied back with copy_."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        self._model = model
        self._saved: dict[int, dict[str, torch.Tensor]] = {}

    def save_model_to_cpu(self, n: int) -> int:  # noqa: D102 - as in Helpers
        # copy=True: on a CPU model .to("cpu") alone would return the live tensor itself.
        self._saved[n] = {name: shard.to("cpu", copy=True) for name, shard in self._shards()}
        return _nbytes(self._saved[n].values())

    def restore_model_from_cpu(self, n: int) -> int:  # noqa: D102 - as in Helpers
        for name, shard in self._shards():
            shard.copy_(self._saved[n][name])
        dist.barrier()
        return _nbytes(self._saved[n].values())

    def clear_cpu_model(self, n: int) -> None:  # noqa: D102 - as in Helpers
        del self._saved[n]

    def _shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the local tensor of every parameter."""
        # After a no_grad forward the root's parameters are whole, plain tensors, which this kind of helper cannot save
        # and restore as shards. The reshard is given to it here so that it works at all.
        self._model.reshard()
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, DTensor)
            yield name, parameter.to_local().detach()


class Shardsnap:
    """A SnapshotService; it reshards the root by itself. Buffers are left out, as the verl-style helpers do."""

    def __init__(self, model: nn.Module) -> None:
        self.service = SnapshotService(model, snapshots=2, include=["parameters"])

    def save_model_to_cpu(self, n: int) -> int:  # noqa: D102 - as in Helpers
        ticket = self.service.save(n)
        ticket.wait()  # a trainer need not wait; it is here so that the time is that of the whole copy
        return ticket.nbytes

    def restore_model_from_cpu(self, n: int) -> int:  # noqa: D102 - as in Helpers
        return self.service.restore(n).nbytes

    def clear_cpu_model(self, n: int) -> None:  # noqa: D102 - as in Helpers
        self.service.drop(n)


class FlippedBit:
    """Helpers that spoil their first restore of version 1 on rank 0, by one bit of one weight."""

    def __init__(self, helpers: Helpers, model: nn.Module) -> None:
        self._helpers = helpers
        self._model = model
        self._done = dist.get_rank() != 0

    def save_model_to_cpu(self, n: int) -> int:  # noqa: D102 - as in Helpers
        return self._helpers.save_model_to_cpu(n)

    def restore_model_from_cpu(self, n: int) -> int:  # noqa: D102 - as in Helpers
        nbytes = self._helpers.restore_model_from_cpu(n)
        if n == 1 and not self._done:
            self._done = True
            weight = next(self._model.parameters())
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.detach().view(torch.int32).view(-1)[0] ^= 1 << 22  # the highest bit of a float's mantissa
        return nbytes

    def clear_cpu_model(self, n: int) -> None:  # noqa: D102 - as in Helpers
        self._helpers.clear_cpu_model(n)


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
