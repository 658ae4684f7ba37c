"""One rank on the device: a process group, and FSDP models of the nets that the tests of several ranks use."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed import scenarios, test_layout_fsdp1, test_layout_fsdp2
from tests.gpu.device import DEVICE, ON_GPU, bytes_of


@contextlib.contextmanager
def one_rank() -> Iterator[str]:
    """A default process group of this process alone; the backend that it got."""
    # No name has to resolve and no network has to be there.
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}):
        backend = _init_any()
        try:
            yield backend
        finally:
            dist.destroy_process_group()


def _init_any() -> str:
    if ON_GPU and dist.is_nccl_available():
        try:
            _init("nccl")
        except Exception as error:
            print(f"nccl does not start, gloo instead: {error}")
            if dist.is_initialized():
                dist.destroy_process_group()
        else:
            return "nccl"
    _init("gloo")
    return "gloo"


def _init(backend: str) -> None:
    store = dist.FileStore(str(Path(tempfile.mkdtemp(prefix="rank")) / "store"), 1)
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    total = torch.ones(1, device=DEVICE)
    dist.all_reduce(total)
    assert total.item() == 1.0


def on_device() -> contextlib.AbstractContextManager[Any]:
    """The scenarios of several ranks read bytes where the CPU can: here wherever they are."""
    return mock.patch.object(scenarios, "bytes_of", bytes_of)


def _made_on_device(kind: type[nn.Module]) -> nn.Module:
    with torch.device(DEVICE):
        return kind()


def fsdp1(**options: Any) -> nn.Module:
    kind = test_layout_fsdp1.Net
    with mock.patch.object(test_layout_fsdp1, "Net", functools.partial(_made_on_device, kind)):
        return test_layout_fsdp1.wrapped(device_id=DEVICE, **options)


def fsdp2(mixed: bool = False, after: bool | None = None) -> nn.Module:
    torch.manual_seed(0)
    net: Any = _made_on_device(test_layout_fsdp2.Net)
    options: dict[str, Any] = {"mesh": init_device_mesh(DEVICE.type, (dist.get_world_size(),))}
    if after is not None:
        options["reshard_after_forward"] = after
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, ignored_params={net.ignored}, **options)


BUILDS = {"fsdp1": fsdp1, "fsdp2": fsdp2}
