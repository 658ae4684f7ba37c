"""Ways to bring weights to the host and back, each behind the same few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

import shardsnap
from benchmarks.device_check.workload import Bf16Weights

Wait = Callable[[], object]
"""Blocks the host until the bytes are where they should be."""


class CopyPath(Protocol):
    """One way. `save` and `restore` return as soon as they can, and a Wait."""

    name: str
    restores: bool

    def open(self) -> str:
        """Take what lives as long as the path; a note for the table."""

    def forget(self) -> None:
        """Bring about the state of a save in the middle of many."""

    def save(self) -> Wait:
        """Begin to copy the weights to the host."""

    def restore(self) -> Wait:
        """Begin to copy them back."""

    def saved(self) -> Sequence[torch.Tensor] | None:
        """What save() left on the host, where restore() does not show it."""

    def close(self) -> None:
        """Give everything back."""


class _Path:
    restores = True

    def __init__(self, live: Sequence[torch.Tensor], device: torch.device) -> None:
        self._live = live
        self._device = device
        self._host: list[torch.Tensor] = []

    def open(self) -> str:
        return ""

    def forget(self) -> None:
        pass

    def saved(self) -> Sequence[torch.Tensor] | None:
        return None

    def close(self) -> None:
        self._host = []

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class VerlStyle(_Path):
    """A fresh pageable tensor per weight and save; copy_ back."""

    name = 'verl-style: .to("cpu"), pageable'

    def forget(self) -> None:  # noqa: D102 - as in CopyPath
        self._host = []

    def save(self) -> Wait:  # noqa: D102 - as in CopyPath
        self._host = [tensor.to("cpu", copy=True) for tensor in self._live]
        return self._wait

    def restore(self) -> Wait:  # noqa: D102 - as in CopyPath
        for tensor, saved in zip(self._live, self._host, strict=True):
            tensor.copy_(saved)
        return self._wait


class SlimeStyle(_Path):
    """A pinned tensor per weight, kept; non-blocking copies and one wait at the end."""

    name = "slime-style: pinned tensors kept"

    def save(self) -> Wait:  # noqa: D102 - as in CopyPath
        if not self._host:
            pin = self._device.type == "cuda"
            self._host = [torch.empty_like(tensor, device="cpu", pin_memory=pin) for tensor in self._live]
        for saved, tensor in zip(self._host, self._live, strict=True):
            saved.copy_(tensor, non_blocking=True)
        return self._wait

    def restore(self) -> Wait:  # noqa: D102 - as in CopyPath
        for tensor, saved in zip(self._live, self._host, strict=True):
            tensor.copy_(saved, non_blocking=True)
        return self._wait


class DcpStager(_Path):
    """The stager of torch.distributed.checkpoint's asynchronous save, with pinned memory that it keeps."""

    name = "torch DCP stager, pinned, kept"
    restores = False

    def open(self) -> str:  # noqa: D102 - as in CopyPath
        from torch.distributed.checkpoint import staging

        # It finds the memory of an earlier call by these objects.
        self._storages = [tensor.untyped_storage() for tensor in self._live]
        self._state = {f"weights.{index}": tensor for index, tensor in enumerate(self._live)}
        self._staged: Any = None
        on_gpu = self._device.type == "cuda"
        if not hasattr(staging, "DefaultStager"):  # before torch 2.9
            self._stager: Any = staging.BlockingAsyncStager(cache_staged_state_dict=on_gpu)
            return "BlockingAsyncStager"
        options = staging.StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=on_gpu, use_non_blocking_copy=on_gpu
        )
        self._stager = staging.DefaultStager(options)
        return "DefaultStager, in its own thread" if on_gpu else "DefaultStager"

    def save(self) -> Wait:  # noqa: D102 - as in CopyPath
        self._staged = self._stager.stage(self._state)
        return self._wait

    def restore(self) -> Wait:  # noqa: D102 - as in CopyPath
        raise NotImplementedError

    def saved(self) -> Sequence[torch.Tensor] | None:  # noqa: D102 - as in CopyPath
        return [self._staged[name] for name in self._state]

    def close(self) -> None:  # noqa: D102 - as in CopyPath
        if hasattr(self, "_stager"):
            self._stager.close()
        self._staged = None

    def _wait(self) -> None:
        if hasattr(self._staged, "result"):
            self._staged = self._staged.result()
        super()._wait()


class Shardsnap(_Path):
    """A SnapshotService with room for two snapshots, as a decoupled trainer has it."""

    name = "shardsnap"

    def __init__(self, model: Bf16Weights, device: torch.device) -> None:
        super().__init__(model.tensors(), device)
        self._model = model
        self._service: shardsnap.SnapshotService | None = None

    def open(self) -> str:  # noqa: D102 - as in CopyPath
        self._service = shardsnap.SnapshotService(self._model, snapshots=2)
        arena = self._service.stats().arena
        return (
            f"{arena.pinned / 1e9:.1f} of {arena.mapped / 1e9:.1f} GB pinned in {arena.slabs} slab(s), "
            f"node {arena.numa_node} {arena.pin_failure}"
        ).strip()

    def save(self) -> Wait:  # noqa: D102 - as in CopyPath
        assert self._service is not None
        return self._service.save("pi_old").wait

    def restore(self) -> Wait:  # noqa: D102 - as in CopyPath
        assert self._service is not None
        self._service.restore("pi_old", wait=False)
        return self._wait

    def close(self) -> None:  # noqa: D102 - as in CopyPath
        if self._service is not None:
            self._service.close()


class Floor:
    """What the link gives: large asynchronous copies between pinned memory, all of it present, and the device."""

    _PIECE = 64 << 20

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._device = device
        on_gpu = device.type == "cuda"
        # A power of two, as torch's pinned memory comes; used again and again.
        room = min(2 << 30, 1 << (nbytes - 1).bit_length())
        self._host = [torch.zeros(room, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._far = [torch.ones(room, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else []

    def to_host(self) -> Wait:
        """Begin to copy nbytes from the device."""
        return self._begin([0])

    def to_device(self) -> Wait:
        """Begin to copy nbytes to the device."""
        return self._begin([1])

    def both(self) -> Wait:
        """Begin to copy nbytes in each direction."""
        return self._begin([0, 1])

    def _begin(self, directions: Sequence[int]) -> Wait:
        for begin in range(0, self.nbytes, self._PIECE):
            length = min(self._PIECE, self.nbytes - begin)
            place = begin % self._host[0].numel()
            for direction in directions:
                host, far = (side[direction][place : place + length] for side in (self._host, self._far))
                source, target = (far, host) if direction == 0 else (host, far)
                if not self._streams:
                    target.copy_(source)
                    continue
                with torch.cuda.stream(self._streams[direction]):
                    target.copy_(source, non_blocking=True)
        return lambda: [stream.synchronize() for stream in self._streams]
