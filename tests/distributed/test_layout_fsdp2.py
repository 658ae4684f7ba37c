"""FSDP2 layouts against real fully_shard models: every byte by address, in every state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardsnap.errors import UnsafeStateError, UnsupportedTensorError, UnsupportedTorchError
from shardsnap.layout import LayoutCache, assert_safe, fsdp2, layout_of, prepare_for_write
from tests.distributed.launch import Ranks
from tests.layout.reading import by_name, bytes_of, entry_bytes, region_bytes, write_regions

TOKENS = torch.arange(10).reshape(2, 5)


class Net(nn.Module):
    """Uneven and empty shards (5 rows, 1 row), a tied head, a module in two places, a buffer, an ignored parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)) for _ in range(2)])
        self.gate = nn.Linear(6, 1)
        self.module = nn.Linear(6, 6)
        self.again = self.module
        self.ignored = nn.Parameter(torch.rand(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0, 1.0, 3.0, 1.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x.to(block[0].weight.dtype))
        x = self.again(self.module(x.to(self.module.weight.dtype)))
        return self.head((x * self.gate(x) * self.ignored).to(self.head.weight.dtype))


def sharded(
    world: tuple[int, ...] | None = None, mixed: bool = False, after: bool | int | None = None, **options: Any
) -> Net:
    torch.manual_seed(0)
    net = Net()
    names = ("replicate", "shard") if world is not None and len(world) == 2 else ("shard",)
    options["mesh"] = init_device_mesh("cpu", world or (dist.get_world_size(),), mesh_dim_names=names)
    if after is not None:  # torch's own default leaves the root gathered after forward
        options["reshard_after_forward"] = after
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, ignored_params={net.ignored}, **options)  # type: ignore[return-value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(TOKENS).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)


def check_against_dtensors(model: nn.Module) -> int:
    """Every entry's bytes are those of the sharded parameter, as state_dict gives it; how many hold some.

    state_dict reshards, so the entries are read first.
    """
    layout = layout_of(model)
    held = {entry.name: (entry, entry_bytes(layout, entry)) for entry in layout.entries}
    reference = model.state_dict()
    assert list(held) == [name for name in reference if name != "scale"] + ["scale"]
    for name, (entry, data) in held.items():
        value = reference[name]
        local = value.to_local() if isinstance(value, DTensor) else value
        assert entry.shape == tuple(value.shape)
        assert (entry.local_shape, entry.dtype) == (tuple(local.shape), local.dtype)
        assert data == bytes_of(local), name
        assert (entry.region == -1) == (local.numel() == 0)
    return sum(bool(data) for _, data in held.values())


def bytes_in_every_state(mixed: bool, after: bool | int | None, world: tuple[int, ...] | None) -> list[int]:
    model = sharded(world, mixed, after)
    counts = [check_against_dtensors(model)]
    with torch.no_grad():
        model(TOKENS)
    counts.append(check_against_dtensors(model))
    optimizer = optimizer_of(model)
    train(model, optimizer)
    counts.append(check_against_dtensors(model))
    output = model(TOKENS)
    counts.append(check_against_dtensors(model))
    output.float().sum().backward()
    counts.append(check_against_dtensors(model))
    return counts


@pytest.mark.parametrize("after", [None, True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_bytes_by_address_are_the_shards_in_every_state(run_ranks: Ranks, mixed: bool, after: bool | None) -> None:
    names = len(Net().state_dict())
    # gate has one row and one bias: rank 1 holds nothing of either
    assert run_ranks(2, bytes_in_every_state, mixed, after, None) == [[names] * 5, [names - 2] * 5]


def test_replicas_and_smaller_gathers(run_ranks: Ranks) -> None:
    names = len(Net().state_dict())
    assert run_ranks(4, bytes_in_every_state, False, True, (2, 2)) == [[names] * 5, [names - 2] * 5] * 2
    for counts in run_ranks(4, bytes_in_every_state, False, 2, None):
        assert len(set(counts)) == 1


def saving_has_no_side_effect() -> Any:
    model = sharded()
    with torch.no_grad():
        model(TOKENS)
    plain = not isinstance(model.embed.weight, DTensor)  # the root stays gathered
    registered = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    layout = layout_of(model)
    assert registered == {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    entry = by_name(layout)["embed.weight"]
    return plain, entry.placement, entry.shape, entry.local_shape, entry.region == by_name(layout)["head.weight"].region


def test_a_gathered_root_is_read_from_its_shards(run_ranks: Ranks) -> None:
    first, second = run_ranks(2, saving_has_no_side_effect)
    assert first == (True, "Shard(dim=0) on mesh shard=2 at (0)", (11, 6), (6, 6), True)
    assert second == (True, "Shard(dim=0) on mesh shard=2 at (1)", (11, 6), (5, 6), True)


def names_and_units() -> Any:
    model = sharded()
    layout = layout_of(model)
    units = {region.name: region.unit for region in layout.regions}
    return layout.kind, [entry.name for entry in layout.entries], units


def test_names_aliases_and_units(run_ranks: Ranks) -> None:
    kind, names, units = run_ranks(2, names_and_units)[0]
    assert kind == "fsdp2"
    assert sorted(names) == sorted(Net().state_dict())
    assert units["embed.weight"] == units["module.bias"] == "(root)"
    assert units["blocks.1.2.weight"] == "blocks.1"
    assert units["ignored"] == units["scale"] == ""
    assert "head.weight" not in units
    assert "again.weight" not in units


def restored_output(mixed: bool, after: bool | None, gradients: bool) -> bool:
    model = sharded(mixed=mixed, after=after)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    layout = layout_of(model)
    saved = region_bytes(layout)
    with torch.no_grad():
        before = model(TOKENS)
    for _ in range(2):
        train(model, optimizer)
    with torch.set_grad_enabled(gradients):
        moved = model(TOKENS).detach()
    prepare_for_write(model)
    assert all(isinstance(p, DTensor) for name, p in model.named_parameters() if name != "ignored")
    now = layout_of(model)
    assert [region.address for region in now.regions] == [region.address for region in layout.regions]
    write_regions(now, saved)
    torch.autograd.graph.increment_version(now.versioned)
    with torch.no_grad():
        result = model(TOKENS)
    train(model, optimizer)
    assert not torch.equal(before, moved)
    return torch.equal(before, result)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("after", [None, True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_forward_after_a_write_sees_it(run_ranks: Ranks, mixed: bool, after: bool | None, gradients: bool) -> None:
    assert run_ranks(2, restored_output, mixed, after, gradients) == [True, True]


def gathered_ahead_of_time(prepare: bool) -> bool:
    """Whether a forward sees a write although a gather was started before it."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        model(torch.ones(1, 4))
    model.reshard()
    model.unshard(async_op=True)
    if prepare:
        prepare_for_write(model)
    layout = layout_of(model)
    write_regions(layout, [bytes(len(data)) for data in region_bytes(layout)])
    with torch.no_grad():
        return not model(torch.ones(1, 4)).any()


def test_a_gather_started_ahead_is_not_used_after_a_write(run_ranks: Ranks) -> None:
    assert run_ranks(2, gathered_ahead_of_time, True) == [True, True]
    assert run_ranks(2, gathered_ahead_of_time, False) == [False, False]


def messages_when_busy() -> dict[str, str]:
    model = sharded()
    messages: dict[str, str] = {}

    def attempt(when: str) -> None:
        try:
            assert_safe(model)
        except UnsafeStateError as error:
            messages[when] = str(error)

    attempt("idle")
    hook = model.blocks[0][0].register_forward_hook(lambda *_: attempt("forward"))
    model(TOKENS)
    hook.remove()
    attempt("between")
    hook = model.blocks[0][0].register_full_backward_hook(lambda *_: attempt("backward"))
    model(TOKENS).sum().backward()
    hook.remove()
    attempt("after backward")
    hook = model.module.register_forward_hook(lambda *_: fsdp2_attempt(model, messages))
    with torch.no_grad():
        model(TOKENS)
    hook.remove()

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    hook = model.blocks[1][0].register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(TOKENS)
    hook.remove()
    attempt("after a failed forward")
    return messages


def fsdp2_attempt(model: nn.Module, messages: dict[str, str]) -> None:
    try:
        fsdp2.assert_safe(fsdp2.units_of(model)[1:])  # blocks, which are done: only the root is still in its forward
    except UnsafeStateError as error:
        messages["finished unit"] = str(error)


def test_busy_units_are_refused_by_name(run_ranks: Ranks) -> None:
    for messages in run_ranks(2, messages_when_busy):
        assert set(messages) == {"forward", "backward", "finished unit", "after a failed forward"}
        assert "(root)" in messages["forward"]
        assert "FORWARD" in messages["forward"]
        assert "backward" in messages["backward"]
        assert "blocks.0" in messages["finished unit"]
        assert "FORWARD of its root" in messages["finished unit"]


def stale_graph(after: bool | None) -> str:
    model = sharded(after=after)
    cache = LayoutCache(model, include=["parameters"], select=lambda name, _: name != "ignored")
    cache.current()
    model(TOKENS).sum().backward()
    output = model(TOKENS)
    # Only what FSDP manages: the graph also holds the ignored weight and the buffer, which would give the same error.
    torch.autograd.graph.increment_version(cache.current().versioned)
    try:
        output.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("after", [None, True, False])
def test_autograd_notices_a_write_between_forward_and_backward(run_ranks: Ranks, after: bool | None) -> None:
    for message in run_ranks(2, stale_graph, after):
        assert "modified by an inplace operation" in message


def optimizer_bumps_versions() -> bool:
    model = sharded()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    layout = layout_of(model)
    before = [tensor._version for tensor in layout.versioned]
    with torch.no_grad():
        model(TOKENS)
    assert before == [tensor._version for tensor in layout.versioned]
    train(model, optimizer)
    return before != [tensor._version for tensor in layout.versioned]


def test_an_optimizer_step_shows_in_the_versions_and_a_forward_does_not(run_ranks: Ranks) -> None:
    assert run_ranks(2, optimizer_bumps_versions) == [True, True]


def cache_life() -> dict[str, bool]:
    model = sharded()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    cache = LayoutCache(model)
    first = cache.current()
    same = {"idle": cache.current() is first}
    with torch.no_grad():
        model(TOKENS)
    same["gathered root"] = cache.current() is first
    output = model(TOKENS)
    same["between"] = cache.current() is first
    output.sum().backward()
    optimizer.step()
    same["after step"] = cache.current() is first
    prepare_for_write(model)
    same["resharded"] = cache.current() is first
    values = {name: nn.Parameter(value.clone()) for name, value in model.state_dict().items() if name != "scale"}
    values |= {"head.weight": values["embed.weight"], "scale": model.scale.clone()}  # one object: it stays tied
    values |= {name: values[name.replace("again", "module")] for name in ("again.weight", "again.bias")}
    model.load_state_dict(values, assign=True)
    same["assigned"] = cache.current() is first
    check_against_dtensors(model)
    first = cache.current()
    model.double()
    same["double"] = cache.current() is first
    assert by_name(cache.current())["blocks.0.0.weight"].dtype is torch.float64
    return same


def test_the_cache_keeps_a_layout_until_something_moves(run_ranks: Ranks) -> None:
    for same in run_ranks(2, cache_life):
        assert [what for what, kept in same.items() if not kept] == ["assigned", "double"]


def selected() -> Any:
    model = sharded()
    with torch.no_grad():
        model(TOKENS)
    names = [e.name for e in layout_of(model, select=["blocks.1.*", "*.bias"]).entries]
    cache = LayoutCache(model, select="trainable")
    before = len(cache.current().entries)
    model.blocks[0].reshard()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    return names, before - len(cache.current().entries)


def test_selections_while_gathered(run_ranks: Ranks) -> None:
    for names, fewer in run_ranks(2, selected):
        assert names == [
            *("blocks.0.0.bias", "blocks.0.2.bias"),
            *("blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.2.weight", "blocks.1.2.bias"),
            *("gate.bias", "module.bias", "again.bias"),
        ]
        assert fewer == 4


def sharded_on_columns() -> Any:
    torch.manual_seed(0)
    whole = nn.Linear(6, 4, bias=False)
    reference = whole.weight.detach().clone()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = fully_shard(whole, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    layout = layout_of(model)
    entry = layout.entries[0]
    part = reference.chunk(2, dim=1)[dist.get_rank()]
    assert entry_bytes(layout, entry) == bytes_of(part)
    return entry.placement, entry.shape, entry.local_shape


def test_shards_of_columns(run_ranks: Ranks) -> None:
    first, second = run_ranks(2, sharded_on_columns)
    assert first == ("Shard(dim=1) on mesh shard=2 at (0)", (4, 6), (4, 3))
    assert second[0] != first[0]


def two_dimensional() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    only_parallel = layout_of(model)  # no FSDP yet
    assert only_parallel.kind == "plain"
    part = model[0].weight.to_local()
    assert entry_bytes(only_parallel, only_parallel.entries[0]) == bytes_of(part)
    fully_shard(model, mesh=mesh["dp"])
    with torch.no_grad():
        before = model(torch.ones(2, 8))
    layout = layout_of(model)
    saved = region_bytes(layout)
    entries = by_name(layout)
    assert entry_bytes(layout, entries["2.weight"]) == bytes_of(model.state_dict()["2.weight"].to_local())
    prepare_for_write(model)
    write_regions(layout, [bytes(len(data)) for data in saved])
    with torch.no_grad():
        assert not model(torch.ones(2, 8)).any()
    prepare_for_write(model)
    write_regions(layout, saved)
    with torch.no_grad():
        assert torch.equal(before, model(torch.ones(2, 8)))
    return only_parallel.entries[0].placement, entries["0.weight"].placement, entries["0.weight"].local_shape


def test_tensor_parallel_with_and_without_fsdp(run_ranks: Ranks) -> None:
    answers = run_ranks(4, two_dimensional)
    assert answers[1][0] == "Shard(dim=0) on mesh tp=2 at (1)"
    assert [shape for _, _, shape in answers] == [(3, 8)] * 4
    assert len({placement for _, placement, _ in answers}) == 4
    assert "on mesh dp=2 x tp=2 at (1, 0)" in answers[2][1]


def offloaded() -> list[int]:
    model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    counts = [check_against_dtensors(model)]
    with torch.no_grad():
        model(TOKENS)
    return [*counts, check_against_dtensors(model)]


def test_shards_offloaded_to_the_host(run_ranks: Ranks) -> None:
    names = len(Net().state_dict())
    assert run_ranks(2, offloaded) == [[names] * 2, [names - 2] * 2]


def one_state_for_two_modules() -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([model[0], model[1]], mesh=init_device_mesh("cpu", (2,)))
    model.register_parameter("mixed", nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)))))
    return [(region.name, region.unit) for region in layout_of(model).regions]


def test_a_unit_of_two_modules_has_both_names(run_ranks: Ranks) -> None:
    for regions in run_ranks(2, one_state_for_two_modules):
        assert regions == [
            ("mixed", ""),
            *((f"{index}.{name}", "0, 1") for index in (0, 1) for name in ("weight", "bias")),
            *((f"2.{name}", "") for name in ("weight", "bias")),
        ]


def refusals() -> list[str]:
    messages = []
    model = sharded()
    model.blocks[0][0].weight = nn.Parameter(torch.ones(4, 6))
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    fully_shard(empty, mesh=init_device_mesh("cpu", (2,)))
    broken = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    del fsdp2.units_of(broken)[0].groups[0].fsdp_params[0].sharded_state
    for module, expected in (
        (model, UnsafeStateError),
        (empty, UnsupportedTensorError),
        (broken, UnsupportedTorchError),
    ):
        with pytest.raises(expected) as caught:
            layout_of(module)
        messages.append(str(caught.value))
    return messages


def test_refusals_have_names(run_ranks: Ranks) -> None:
    for replaced, meta, internal in run_ranks(2, refusals):
        assert "blocks.0.0.weight was replaced" in replaced
        assert meta.startswith("weight: a meta tensor")
        assert "sharded_state" in internal
        assert torch.__version__ in internal
