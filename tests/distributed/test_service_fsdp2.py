"""The service over real FSDP2 models and DDP: every mesh, bit for bit, and a wrapper that is healthy afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardsnap import SnapshotService
from tests.distributed import scenarios
from tests.distributed.launch import Ranks
from tests.distributed.test_layout_fsdp1 import Net as Subscriptless  # its forward looks into no block
from tests.distributed.test_layout_fsdp2 import Net, sharded


def every_name() -> list[str]:
    return list(Net().state_dict())


def check_names(answers: list[list[str]], world_size: int) -> None:
    assert [sorted(names) for names in answers] == [sorted(every_name())] * world_size


@pytest.mark.parametrize("after", [None, True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_round_trip(run_ranks: Ranks, mixed: bool, after: bool | None) -> None:
    check_names(run_ranks(2, scenarios.round_trip, sharded, {"mixed": mixed, "after": after}), 2)


@pytest.mark.parametrize("options", [{"after": 2}, {"world": (2, 2)}, {"world": (2, 2), "mixed": True, "after": False}])
def test_smaller_gathers_and_replicas(run_ranks: Ranks, options: dict[str, Any]) -> None:
    check_names(run_ranks(4, scenarios.round_trip, sharded, options), 4)


def saved_while_gathered() -> tuple[bool, bool]:
    """The sequence that other helpers fail at, without a look at the weights in between, which would reshard."""
    model = sharded()
    optimizer = scenarios.optimizer_of(model)
    with SnapshotService(model, snapshots=1) as service:
        output = scenarios.output_of(model)
        plain = not isinstance(model.embed.weight, DTensor)
        service.save("old")
        scenarios.train(model, optimizer)
        moved = scenarios.output_of(model)
        stale = not isinstance(model.embed.weight, DTensor)
        service.restore("old")
        assert moved != output
        assert scenarios.output_of(model) == output
        twin = sharded()
        assert scenarios.differing(scenarios.shards(model), scenarios.shards(twin)) == []
        assert scenarios.whole(model) == scenarios.whole(twin)
    return plain, stale


def test_saved_and_restored_while_the_root_is_gathered(run_ranks: Ranks) -> None:
    assert run_ranks(2, saved_while_gathered) == [(True, True)] * 2


def frozen() -> nn.Module:
    model = sharded()
    for parameter in (*model.blocks[0].parameters(), model.gate.weight, model.ignored):
        parameter.requires_grad_(False)
    return model


def test_frozen_parameters(run_ranks: Ranks) -> None:
    check_names(run_ranks(2, scenarios.round_trip, frozen, {}), 2)


def offloaded() -> nn.Module:
    return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))


def test_offload_to_the_host(run_ranks: Ranks) -> None:
    check_names(run_ranks(2, scenarios.round_trip, offloaded, {}), 2)


def on_columns() -> nn.Module:
    # torch shards other dimensions than the first evenly only; the biases stay on theirs
    return sharded(shard_placement_fn=lambda parameter: Shard(1) if parameter.shape[1:] == (6,) else None)


def columns() -> list[str]:
    model = on_columns()
    assert model.blocks[0][0].weight.placements == (Shard(1),)
    return scenarios.round_trip(on_columns, {})


def test_shards_of_columns(run_ranks: Ranks) -> None:
    check_names(run_ranks(2, columns), 2)


class Crossed(nn.Sequential):
    """Two layers that tensor parallelism splits across each other; the last one has 5 rows for FSDP alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.float()[:, :1] / 10 + torch.arange(6.0))


def crossed(inner: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Crossed()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if inner:
        fully_shard(model[0], mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@pytest.mark.parametrize("inner", [False, True])
def test_tensor_parallel_inside_fsdp(run_ranks: Ranks, inner: bool) -> None:
    names = [f"{index}.{name}" for index in (0, 2, 3) for name in ("weight", "bias")]
    assert run_ranks(4, scenarios.round_trip, crossed, {"inner": inner}) == [names] * 4


def nested() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    last = fully_shard(nn.Linear(3, 1), mesh=mesh)
    inner = fully_shard(nn.Sequential(nn.Linear(7, 3), nn.Tanh(), last), mesh=mesh)
    return fully_shard(nn.Sequential(nn.Embedding(10, 7), nn.Sequential(inner), nn.Linear(1, 1)), mesh=mesh)


def test_nested_units(run_ranks: Ranks) -> None:
    names = [*("0.weight", "1.0.0.weight", "1.0.0.bias", "1.0.2.weight", "1.0.2.bias", "2.weight", "2.bias")]
    assert run_ranks(2, scenarios.round_trip, nested, {}) == [names] * 2


def compiled() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return scenarios.compiled_and_checkpointed(Subscriptless(), lambda module: fully_shard(module, mesh=mesh))


def test_names_under_compile_and_checkpoint_wrappers(run_ranks: Ranks) -> None:
    names = list(Subscriptless().state_dict())
    for restored in run_ranks(2, scenarios.round_trip, compiled, {}):
        assert sorted(restored) == sorted(names)


def llama() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = scenarios.tiny_llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel_llama() -> nn.Module:
    return DistributedDataParallel(scenarios.tiny_llama())


@pytest.mark.parametrize("build", [llama, parallel_llama])
def test_a_transformer_with_tied_embeddings(run_ranks: Ranks, build: scenarios.Build) -> None:
    for names in run_ranks(2, scenarios.round_trip, build, {}):
        assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"} < set(names)


def adapted() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = scenarios.Adapters()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_only_adapters_are_held(run_ranks: Ranks) -> None:
    answers = run_ranks(2, scenarios.only_adapters, adapted)
    assert [names for names, _, _ in answers] == [scenarios.ADAPTER_NAMES] * 2
    assert [held for _, held, _ in answers] == [expected for _, _, expected in answers]
    assert sum(held for _, held, _ in answers) == 4 * 2 * 2 * 3 * 7


@pytest.mark.parametrize("after", [None, True, False])
def test_a_graph_from_before_a_restore_is_refused(run_ranks: Ranks, after: bool | None) -> None:
    for message in run_ranks(2, scenarios.stale_graph, sharded, {"after": after}):
        assert "modified by an inplace operation" in message


@pytest.mark.parametrize("after", [None, True])
def test_refused_inside_forward_and_backward(run_ranks: Ranks, after: bool | None) -> None:
    scenarios.check_refusals(run_ranks(2, scenarios.refused_inside, sharded, {"after": after}, "blocks.1.0", "ignored"))


def large() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(2))), mesh=mesh)


def test_a_guarded_step_waits_for_the_save(run_ranks: Ranks) -> None:
    assert any(run_ranks(2, scenarios.fenced_rounds, large, {}, 8))  # else nothing was put to the test


class Owner(nn.Module):
    """Has a submodule that is called as DDP calls its own, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 3)
        self.module = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.module(self.embed(tokens).flatten(0, 1)))


def parallel() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(Owner())


def statistics() -> bool:
    """A forward in training mode moves batch statistics, which are buffers: they come back with the rest."""
    model = parallel()
    with SnapshotService(model, snapshots=1) as service:
        service.save(7)
        before = copy.deepcopy(model.state_dict())
        model(scenarios.TOKENS)
        moved = not torch.equal(before["module.norm.running_mean"], model.state_dict()["module.norm.running_mean"])
        service.restore(7)
        return moved and all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def without_statistics() -> nn.Module:
    model = parallel()
    model.module.norm = nn.LayerNorm(2)
    return DistributedDataParallel(model.module)


def test_ddp(run_ranks: Ranks) -> None:
    names = ["embed.weight", "module.weight", "module.bias", "norm.weight", "norm.bias"]
    assert run_ranks(2, scenarios.round_trip, without_statistics, {}) == [names] * 2
    assert run_ranks(2, statistics) == [True] * 2
