"""The service over real FSDP1 models: every strategy, bit for bit, and a wrapper that is healthy afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - its usual name

from tests.distributed import scenarios
from tests.distributed.launch import Ranks
from tests.distributed.test_layout_fsdp1 import STRATEGIES, Net, wrapped

CPU = torch.device("cpu")


def every_name() -> list[str]:
    return [*dict(Net().named_parameters(remove_duplicate=False)), "scale"]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_round_trip(run_ranks: Ranks, strategy: str, original: bool, mixed: bool) -> None:
    options = {"strategy": strategy, "original": original, "mixed": mixed}
    assert run_ranks(2, scenarios.round_trip, wrapped, options) == [every_name()] * 2


@pytest.mark.parametrize("original", [False, True])
def test_a_frozen_unit(run_ranks: Ranks, original: bool) -> None:
    options = {"strategy": "FULL_SHARD", "original": original, "frozen": True}
    assert run_ranks(2, scenarios.round_trip, wrapped, options) == [every_name()] * 2


def hybrid(strategy: str, original: bool) -> FSDP:
    mesh = init_device_mesh("cpu", (2, 2))
    return wrapped(strategy, original, device_mesh=mesh)


@pytest.mark.parametrize(("strategy", "original"), [("HYBRID_SHARD", True), ("_HYBRID_SHARD_ZERO2", False)])
def test_hybrid_sharding(run_ranks: Ranks, strategy: str, original: bool) -> None:
    options = {"strategy": strategy, "original": original}
    assert run_ranks(4, scenarios.round_trip, hybrid, options) == [every_name()] * 4


def offloaded_round_trip(original: bool) -> list[str]:
    with scenarios.offloading_without_accelerator():
        options = {"strategy": "FULL_SHARD", "original": original, "cpu_offload": CPUOffload(offload_params=True)}
        # Without an accelerator, torch adds up the gradients of all steps under offload with use_orig_params.
        return scenarios.round_trip(wrapped, options, repeatable=not original)


@pytest.mark.parametrize("original", [False, True])
def test_offload_to_the_host(run_ranks: Ranks, original: bool) -> None:
    assert run_ranks(2, offloaded_round_trip, original) == [every_name()] * 2


def nested(original: bool) -> FSDP:
    """Units in units, one around a module whose parameters are all in an inner unit, and sizes of 1 and 3."""
    torch.manual_seed(0)

    def wrap(module: nn.Module) -> FSDP:
        return FSDP(module, use_orig_params=original, device_id=CPU)

    inner = wrap(nn.Sequential(nn.Linear(7, 3), nn.Tanh(), wrap(nn.Linear(3, 1))))
    return wrap(nn.Sequential(nn.Embedding(10, 7), wrap(nn.Sequential(inner)), nn.Linear(1, 1)))


@pytest.mark.parametrize("original", [False, True])
def test_nested_units(run_ranks: Ranks, original: bool) -> None:
    names = [*("0.weight", "1.0.0.weight", "1.0.0.bias", "1.0.2.weight", "1.0.2.bias", "2.weight", "2.bias")]
    assert run_ranks(2, scenarios.round_trip, nested, {"original": original}) == [names] * 2


def compiled() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    ignored = [net.ignored]

    def wrap(module: nn.Module) -> FSDP:
        return FSDP(module, use_orig_params=True, device_id=CPU, ignored_modules=ignored if module is net else None)

    return scenarios.compiled_and_checkpointed(net, wrap)


def test_names_under_compile_and_checkpoint_wrappers(run_ranks: Ranks) -> None:
    assert run_ranks(2, scenarios.round_trip, compiled, {}) == [every_name()] * 2


def llama(original: bool) -> FSDP:
    model = scenarios.tiny_llama()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FSDP(layer, use_orig_params=original, device_id=CPU)
    return FSDP(model, use_orig_params=original, device_id=CPU)


@pytest.mark.parametrize("original", [False, True])
def test_a_transformer_with_tied_embeddings(run_ranks: Ranks, original: bool) -> None:
    for names in run_ranks(2, scenarios.round_trip, llama, {"original": original}):
        assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"} < set(names)


def adapted() -> FSDP:
    torch.manual_seed(0)
    model = scenarios.Adapters()
    for index, layer in enumerate(model):
        model[index] = FSDP(layer, use_orig_params=True, device_id=CPU)
    return FSDP(model, use_orig_params=True, device_id=CPU)


def test_only_adapters_are_held(run_ranks: Ranks) -> None:
    answers = run_ranks(2, scenarios.only_adapters, adapted)
    assert [names for names, _, _ in answers] == [scenarios.ADAPTER_NAMES] * 2
    assert [held for _, held, _ in answers] == [expected for _, _, expected in answers]
    assert sum(held for _, held, _ in answers) == 4 * 2 * 2 * 3 * 7


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_graph_from_before_a_restore_is_refused(run_ranks: Ranks, strategy: str, original: bool) -> None:
    for message in run_ranks(2, scenarios.stale_graph, wrapped, {"strategy": strategy, "original": original}):
        assert "modified by an inplace operation" in message or "has been modified inplace" in message


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_refused_inside_forward_and_backward(run_ranks: Ranks, strategy: str, original: bool) -> None:
    options = {"strategy": strategy, "original": original}
    scenarios.check_refusals(
        run_ranks(2, scenarios.refused_inside, wrapped, options, "blocks.1.module.0", "module.ignored.weight")
    )


def large(**options: Any) -> FSDP:
    return FSDP(nn.Linear(4096, 4096, bias=False), device_id=CPU, **options)


@pytest.mark.parametrize("original", [False, True])
def test_a_guarded_step_waits_for_the_save(run_ranks: Ranks, original: bool) -> None:
    in_flight = run_ranks(2, scenarios.fenced_rounds, large, {"use_orig_params": original}, 8)
    assert any(in_flight)  # else nothing was put to the test
