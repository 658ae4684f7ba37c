"""FSDP1 layouts against real units: every byte by address, every strategy, every state."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - its usual name

from shardsnap.errors import UnsafeStateError, UnsupportedTensorError, UnsupportedTorchError
from shardsnap.layout import LayoutCache, assert_safe, clean_name, fsdp1, layout_of, prepare_for_write
from tests.distributed.launch import Ranks
from tests.layout.reading import by_name, bytes_of, entry_bytes, region_bytes, write_regions

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Net(nn.Module):
    """Odd sizes, a tied head, a frozen weight, a buffer, a module that FSDP ignores and one that is in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2)])
        self.module = nn.Linear(6, 6)  # the user's own name, not DDP's
        self.again = self.module
        self.ignored = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0, 1.0, 3.0, 1.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale.to(self.module.weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        x = self.again(self.module(x))
        return self.head(x + self.ignored(x.float()).to(x.dtype))


TOKENS = torch.arange(10).reshape(2, 5)


def wrapped(strategy: str, original: bool, mixed: bool = False, frozen: bool = False, **options: Any) -> FSDP:
    torch.manual_seed(0)
    net = Net()
    if frozen:
        net.blocks[0].requires_grad_(False)
    options.setdefault("device_id", torch.device("cpu"))
    options["sharding_strategy"] = ShardingStrategy[strategy]
    options["use_orig_params"] = original
    options["ignored_modules"] = [net.ignored]
    if mixed:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FSDP(block, **{**options, "ignored_modules": None})
    return FSDP(net, **options)


def full_values(model: FSDP) -> dict[str, bytes]:
    """What torch itself says the whole parameters are, every tied name included."""
    with FSDP.summon_full_params(model, writeback=False):
        return {
            clean_name(name): bytes_of(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
        }


def train(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    model(TOKENS).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: FSDP) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def held(model: FSDP) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    layout = layout_of(model, include=["parameters"])
    return {e.name: (e.placement, e.shape, entry_bytes(layout, e)) for e in layout.entries}


def bytes_in_every_state(strategy: str, original: bool, mixed: bool, world: Any = None) -> Any:
    mesh = {} if world is None else {"device_mesh": init_device_mesh("cpu", world)}
    model = wrapped(strategy, original, mixed, **mesh)
    fresh = held(model)
    answers = [(full_values(model), fresh)]
    with torch.no_grad():
        model(TOKENS)
    idle = held(model)  # taken while the root may still be gathered
    answers.append((full_values(model), idle))
    optimizer = optimizer_of(model)
    train(model, optimizer)
    answers.append((full_values(model), held(model)))
    output = model(TOKENS)
    between = held(model)
    output.float().sum().backward()
    answers.append((full_values(model), between))
    return answers


def check_coverage(answers: list[Any], replicas: int) -> None:
    """Every rank holds what its placement says, and all ranks together hold every element `replicas` times."""
    for state in zip(*answers, strict=True):
        names = set(state[0][0])
        assert "embed.weight" in names
        assert "head.weight" in names
        assert "again.bias" in names
        for name in names:
            counts: dict[int, int] = {}
            for full, parts in state:
                placement, shape, data = parts[name]
                whole = full[name]
                if placement == "":
                    assert data == whole, name
                    continue
                itemsize = len(whole) // torch.Size(shape).numel()
                if placement == "elements none":
                    assert data == b""
                    continue
                start, end = map(int, re.fullmatch(r"elements \[(\d+), (\d+)\)", placement).groups())  # type: ignore[union-attr]
                assert end > start
                assert data == whole[start * itemsize : end * itemsize], (name, placement)
                for element in range(start, end):
                    counts[element] = counts.get(element, 0) + 1
            if counts:
                assert counts == dict.fromkeys(range(torch.Size(shape).numel()), replicas), name
        for full, parts in state:
            assert set(parts) == names
            assert parts["embed.weight"] == parts["head.weight"]
            assert parts["module.weight"] == parts["again.weight"]
            assert set(full) == names


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_by_address_are_the_parameters(run_ranks: Ranks, strategy: str, original: bool, mixed: bool) -> None:
    answers = run_ranks(2, bytes_in_every_state, strategy, original, mixed)
    check_coverage(answers, 2 if strategy == "NO_SHARD" else 1)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_sharding_holds_every_element_once_per_replica(run_ranks: Ranks, strategy: str) -> None:
    check_coverage(run_ranks(4, bytes_in_every_state, strategy, True, False, (2, 2)), 2)


def shapes_of_layout(strategy: str, original: bool) -> Any:
    model = wrapped(strategy, original)
    layout = layout_of(model)
    shards = {unit.name: fsdp1.local_shard(unit) for unit in fsdp1.units_of(model)}
    for region in layout.regions:
        if region.unit:
            assert region.name == f"{region.unit} (flat shard)"
            shard = shards.pop(region.unit)
            assert (region.address, region.nbytes) == (shard.data_ptr(), shard.numel() * 4)
    assert shards == {}
    return layout.kind, [(r.name, r.unit) for r in layout.regions], [e.name for e in layout.entries]


@pytest.mark.parametrize("original", [False, True])
def test_a_unit_is_one_region_and_names_are_in_the_model_s_order(run_ranks: Ranks, original: bool) -> None:
    for kind, regions, names in run_ranks(2, shapes_of_layout, "FULL_SHARD", original):
        assert kind == f"fsdp1(use_orig_params={original})"
        assert regions == [
            ("(root) (flat shard)", "(root)"),
            ("blocks.0 (flat shard)", "blocks.0"),
            ("blocks.1 (flat shard)", "blocks.1"),
            ("ignored.weight", ""),
            ("ignored.bias", ""),
            ("scale", ""),
        ]
        assert names == [*dict(Net().named_parameters(remove_duplicate=False)), "scale"]


def restored_output(strategy: str, original: bool, mixed: bool, gradients: bool) -> Any:
    model = wrapped(strategy, original, mixed)
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
    assert not [unit.name for unit in fsdp1.units_of(model) if fsdp1._keeps_gathered(unit.handle)]
    now = layout_of(model)
    assert [r.address for r in now.regions] == [r.address for r in layout.regions]
    write_regions(now, saved)
    torch.autograd.graph.increment_version(now.versioned)
    with torch.no_grad():
        after = model(TOKENS)
    if not gradients:  # torch itself cannot train with mixed precision after a forward that had no backward
        train(model, optimizer)
    assert not torch.equal(before, moved)
    return torch.equal(before, after), bool(torch.isfinite(model(TOKENS)).all())


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_forward_after_a_write_sees_it(
    run_ranks: Ranks, strategy: str, original: bool, mixed: bool, gradients: bool
) -> None:
    assert run_ranks(2, restored_output, strategy, original, mixed, gradients) == [(True, True)] * 2


def test_without_resharding_the_root_would_not_see_a_write(run_ranks: Ranks) -> None:
    """The reason for prepare_for_write; once torch gathers again by itself this fails and it may go."""
    root_only = run_ranks(2, stale_root)
    assert root_only == [True, True]


def stale_root() -> bool:
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with torch.no_grad():
        before = model(torch.ones(1, 4))
        layout = layout_of(model)
        write_regions(layout, [bytes(len(data)) for data in region_bytes(layout)])
        return torch.equal(before, model(torch.ones(1, 4)))


def resharded_between_forward_and_backward(strategy: str, original: bool) -> Any:
    gradients = []
    for reshard in (False, True):
        model = wrapped(strategy, original)
        optimizer = optimizer_of(model)
        for _ in range(2):
            output = model(TOKENS)
            if reshard:
                prepare_for_write(model)
            output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gradients.append(full_values(model))
    return gradients[0] == gradients[1]


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resharding_between_forward_and_backward_changes_nothing(
    run_ranks: Ranks, strategy: str, original: bool
) -> None:
    assert run_ranks(2, resharded_between_forward_and_backward, strategy, original) == [True, True]


def messages_when_busy(original: bool) -> dict[str, str]:
    model = wrapped("FULL_SHARD", original)
    messages: dict[str, str] = {}

    def attempt(when: str) -> None:
        try:
            assert_safe(model)
        except UnsafeStateError as error:
            messages[when] = str(error)

    attempt("idle")
    unit = model.blocks[0]
    hook = unit.module[0].register_forward_hook(lambda *_: attempt("forward"))
    output = model(TOKENS)
    hook.remove()
    attempt("between")
    output.register_hook(lambda _: attempt("start of backward"))
    hook = unit.module[0].register_full_backward_hook(lambda *_: attempt("backward"))
    model(TOKENS).sum().backward()
    hook.remove()
    attempt("after backward")
    with FSDP.summon_full_params(model):
        attempt("summon_full_params")
    with FSDP.summon_full_params(model.blocks[0], recurse=False):
        attempt("summon one")
    attempt("after summon")
    return messages


@pytest.mark.parametrize("original", [False, True])
def test_busy_units_are_refused_by_name(run_ranks: Ranks, original: bool) -> None:
    for messages in run_ranks(2, messages_when_busy, original):
        assert set(messages) == {"forward", "backward", "summon_full_params", "summon one"}
        assert "(root)" in messages["forward"]
        assert "FORWARD" in messages["forward"]
        assert "backward" in messages["backward"]
        assert "SUMMON_FULL_PARAMS" in messages["summon_full_params"]
        assert "blocks.0" in messages["summon one"]


def stale_graph(strategy: str, original: bool) -> str:
    model = wrapped(strategy, original)
    model(TOKENS).sum().backward()
    output = model(TOKENS)
    # Only what FSDP manages: the graph also holds the ignored weight and the buffer, which would give the same error.
    managed = layout_of(model, include=["parameters"], select=lambda name, _: not name.startswith("ignored"))
    torch.autograd.graph.increment_version(managed.versioned)
    try:
        output.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autograd_notices_a_write_between_forward_and_backward(run_ranks: Ranks, strategy: str, original: bool) -> None:
    for message in run_ranks(2, stale_graph, strategy, original):
        assert "modified by an inplace operation" in message or "has been modified inplace" in message


def optimizer_bumps_versions(original: bool) -> bool:
    model = wrapped("FULL_SHARD", original)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    layout = layout_of(model)
    before = [tensor._version for tensor in layout.versioned]
    assert before == [tensor._version for tensor in layout_of(model).versioned]
    train(model, optimizer)
    return before != [tensor._version for tensor in layout.versioned]


@pytest.mark.parametrize("original", [False, True])
def test_an_optimizer_step_shows_in_the_versions(run_ranks: Ranks, original: bool) -> None:
    assert run_ranks(2, optimizer_bumps_versions, original) == [True, True]


def cache_life(original: bool, strategy: str) -> dict[str, bool]:
    model = wrapped(strategy, original)
    cache = LayoutCache(model)
    first = cache.current()
    same = {"idle": cache.current() is first}
    with torch.no_grad():
        model(TOKENS)
    first = cache.current()  # FSDP may set its shards anew in the first forward
    optimizer = optimizer_of(model)
    with torch.no_grad():
        model(TOKENS)
    same["after forward"] = cache.current() is first
    output = model(TOKENS)
    same["between"] = cache.current() is first
    output.sum().backward()
    same["after backward"] = cache.current() is first
    optimizer.step()
    same["after step"] = cache.current() is first
    with FSDP.summon_full_params(model):
        pass
    same["after summon"] = cache.current() is first
    model.ignored.weight.data = model.ignored.weight.data.clone()
    same["ignored parameter moved"] = cache.current() is first
    first = cache.current()
    unit = fsdp1.units_of(model)[1]
    flat_param = unit.handle.flat_param
    flat_param.data = flat_param.data.clone()  # as offloading does: the flat parameter and its shard move together
    flat_param._local_shard = flat_param.data
    if original:
        unit.handle._use_sharded_views()
    moved = cache.current()
    same["shard moved"] = moved is first
    assert by_name(moved)["blocks.0.0.weight"].region >= -1
    assert {r.address for r in moved.regions if r.unit == "blocks.0"} == {flat_param.data_ptr()}
    return same


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_cache_keeps_a_layout_until_something_moves(run_ranks: Ranks, original: bool, strategy: str) -> None:
    for same in run_ranks(2, cache_life, original, strategy):
        assert [what for what, kept in same.items() if not kept] == ["ignored parameter moved", "shard moved"]


def selections(original: bool) -> Any:
    model = wrapped("FULL_SHARD", original, frozen=True)
    whole = by_name(layout_of(model))
    reference = {e.name: entry_bytes(layout_of(model), e) for e in whole.values()}
    found: dict[str, Any] = {}
    choices: dict[str, Any] = {
        "glob": ["blocks.1.*", "*.bias"],
        "trainable": "trainable",
        "predicate": lambda name, tensor: tensor.requires_grad and name.endswith("0.weight"),
    }
    for label, select in choices.items():
        layout = layout_of(model, select=select)
        for entry in layout.entries:
            assert entry_bytes(layout, entry) == reference[entry.name]
        covered = sum(entry.nbytes for entry in layout.entries)
        found[label] = [e.name for e in layout.entries], [r.name for r in layout.regions], layout.nbytes, covered
    return found


@pytest.mark.parametrize("original", [False, True])
def test_selected_names_of_a_unit_are_regions_of_their_own(run_ranks: Ranks, original: bool) -> None:
    for found in run_ranks(2, selections, original):
        names, regions, _nbytes, _covered = found["glob"]
        assert names == [
            *("blocks.0.0.bias", "blocks.0.2.bias"),
            *("blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.2.weight", "blocks.1.2.bias"),
            *("module.bias", "again.bias", "ignored.bias"),
        ]
        assert "blocks.1 (flat shard)" in regions  # all of it is wanted: one region, as without a selection
        assert "blocks.0 (flat shard)" not in regions
        assert "(root) (flat shard)" not in regions
        trainable = found["trainable"][0]
        assert [name for name in trainable if name.startswith("blocks.0")] == []
        assert "embed.weight" in trainable
        assert "head.weight" in trainable
        assert "scale" not in trainable
        assert found["predicate"][0] == ["blocks.1.0.weight"]
        assert found["predicate"][2] == found["predicate"][3]  # no padding, no neighbours


def freezing_rebuilds(original: bool) -> Any:
    model = wrapped("FULL_SHARD", original)
    cache = LayoutCache(model, select="trainable")
    first = cache.current()
    kept = cache.current() is first
    unit = fsdp1.units_of(model)[1]
    for parameter in unit.module.parameters():
        parameter.requires_grad_(False)
    names = [entry.name for entry in cache.current().entries]
    return kept, [name for name in names if name.startswith("blocks.0")], len(names)


@pytest.mark.parametrize("original", [False, True])
def test_trainable_notices_a_frozen_unit(run_ranks: Ranks, original: bool) -> None:
    for kept, frozen, rest in run_ranks(2, freezing_rebuilds, original):
        assert kept
        assert frozen == []
        assert rest > 0


def replaced_parameter() -> list[str]:
    messages = []
    model = wrapped("FULL_SHARD", True)
    with torch.no_grad():
        model(TOKENS)
    cache = LayoutCache(model)
    cache.current()
    parameter = max(model.blocks[1].parameters(), key=torch.Tensor.numel)
    if parameter.numel():
        parameter.data = parameter.data.clone()
        for build in (cache.current, lambda: layout_of(model)):
            try:
                build()
            except UnsafeStateError as error:
                messages.append(str(error))
    model = wrapped("FULL_SHARD", False)
    with torch.no_grad():
        model(TOKENS)
    model.double()
    try:
        layout_of(model)
    except UnsafeStateError as error:
        messages.append(str(error))
    return messages


def test_data_that_fsdp_has_not_taken_over_is_refused(run_ranks: Ranks) -> None:
    for messages in run_ranks(2, replaced_parameter):
        assert len(messages) == 3
        assert "blocks.1" in messages[0]
        assert "given other data" in messages[0]
        assert messages[1] == messages[0]
        assert "moved" in messages[2]
        assert "(root)" in messages[2]


def refusals() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    messages = []
    mixed = FSDP(
        nn.Sequential(FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True), nn.Linear(2, 2)),
        device_id=torch.device("cpu"),
    )
    both = nn.Sequential(FSDP(nn.Linear(2, 2), device_id=torch.device("cpu")), nn.Linear(2, 2))
    fully_shard(both[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for model in (mixed, both):
        try:
            layout_of(model)
        except UnsupportedTensorError as error:
            messages.append(str(error))
    return messages


def test_mixed_wrappers_are_refused_by_name(run_ranks: Ranks) -> None:
    for mixed, both in run_ranks(2, refusals):
        assert "use_orig_params" in mixed
        assert "(root)" in mixed
        assert "unit 0" in mixed
        assert "around 0 and fully_shard on 1" in both


def offloaded(original: bool) -> Any:
    torch.manual_seed(0)
    pin_memory = torch.Tensor.pin_memory
    if not torch.cuda.is_available():  # torch cannot pin without an accelerator: the copy that pinning makes has to do
        torch.Tensor.pin_memory = lambda self, *_: self.clone()  # type: ignore[method-assign]
    try:
        options = {"device_id": torch.device("cpu"), "cpu_offload": CPUOffload(offload_params=True)}
        model = FSDP(nn.Linear(5, 3), use_orig_params=original, **options)
        cache = LayoutCache(model)
        answers = []
        fresh = cache.current()
        answers.append((full_values(model), held(model)))
        with torch.no_grad():
            model(torch.ones(1, 5))
        moved = [r.address for r in cache.current().regions] != [r.address for r in fresh.regions]
        answers.append((full_values(model), held(model)))
        prepare_for_write(model)
        layout = cache.current()
        write_regions(layout, [bytes(len(data)) for data in region_bytes(layout)])
        with torch.no_grad():
            zero = not model(torch.ones(1, 5)).any()
        return moved, zero, [region.device.type for region in layout.regions], answers
    finally:
        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]


@pytest.mark.parametrize("original", [False, True])
def test_shards_offloaded_to_the_host(run_ranks: Ranks, original: bool) -> None:
    answers = run_ranks(2, offloaded, original)
    for moved, zero, devices, _ in answers:
        assert moved  # the first forward pins, which moves the shard
        assert zero
        assert devices == ["cpu"]
    for state in zip(*(answer[3] for answer in answers), strict=True):
        for name, whole in state[0][0].items():
            assert b"".join(parts[name][2] for _, parts in state) == whole


def missing_internal() -> str:
    model = wrapped("FULL_SHARD", True)
    handle = fsdp1.units_of(model)[0].handle
    infos = handle.flat_param._shard_param_infos
    del handle.flat_param._shard_param_infos
    try:
        layout_of(model)
    except UnsupportedTorchError as error:
        return str(error)
    finally:
        handle.flat_param._shard_param_infos = infos
    return ""


def test_a_torch_without_an_internal_is_named(run_ranks: Ranks) -> None:
    for message in run_ranks(2, missing_internal):
        assert torch.__version__ in message
        assert "_shard_param_infos" in message
        assert "2.6 to 2.13" in message
