"""Plain layouts that need ranks: DDP and DTensors outside FSDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardsnap.layout import LayoutCache, layout_of
from tests.distributed.launch import Ranks
from tests.layout.reading import by_name, bytes_of, entry_bytes


class Owner(nn.Module):
    """Has a submodule that is called as DDP calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)


def names_under_ddp() -> list[list[str]]:
    model = Owner()
    inside = nn.Sequential(DistributedDataParallel(Owner()))
    return [[entry.name for entry in layout_of(module).entries] for module in (DistributedDataParallel(model), inside)]


def test_ddp_leaves_names_alone(run_ranks: Ranks) -> None:
    expected = [*dict(Owner().named_parameters()), *dict(Owner().named_buffers())]
    for outer, inner in run_ranks(2, names_under_ddp):
        assert outer == expected
        assert inner == [f"0.{name}" for name in expected]


def parts_of_a_dtensor() -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(15.0).reshape(5, 3)
    model = nn.Module()
    model.rows = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    model.columns = nn.Parameter(distribute_tensor(whole[:, :2].contiguous(), mesh, [Shard(1)]))
    model.copies = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
    model.one = nn.Parameter(distribute_tensor(torch.ones(1), mesh, [Shard(0)]))
    cache = LayoutCache(model)
    layout = cache.current()
    entries = by_name(layout)
    rank = dist.get_rank()
    assert entry_bytes(layout, entries["rows"]) == bytes_of(whole.chunk(2)[rank])
    assert entry_bytes(layout, entries["columns"]) == bytes_of(whole[:, rank : rank + 1])
    assert entry_bytes(layout, entries["copies"]) == bytes_of(whole)
    assert entries["one"].region == (3 if rank == 0 else -1)
    assert any(tensor is model.rows for tensor in layout.versioned)
    assert any(tensor is model.rows._local_tensor for tensor in layout.versioned)
    kept = cache.current() is layout
    model.rows._local_tensor = model.rows._local_tensor.clone()
    return kept, cache.current() is layout, [entry.placement for entry in layout.entries], entries["one"].nbytes


def test_dtensors_outside_fsdp(run_ranks: Ranks) -> None:
    first, second = run_ranks(2, parts_of_a_dtensor)
    assert first[:2] == second[:2] == (True, False)
    assert first[2] == [
        "Shard(dim=0) on mesh tp=2 at (0)",
        "Shard(dim=1) on mesh tp=2 at (0)",
        "Replicate() on mesh tp=2 at (0)",
        "Shard(dim=0) on mesh tp=2 at (0)",
    ]
    assert not set(first[2]) & set(second[2])
    assert (first[3], second[3]) == (4, 0)
