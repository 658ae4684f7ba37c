"""One wrapper, all three ways, from the same initial weights: what each rank runs, and what rank 0 sends home."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardsnap.cli.demo.clock import Call, Clock
from shardsnap.cli.demo.helpers import FlippedBit, Helpers, Shardsnap, VerlStyleFsdp1, VerlStyleFsdp2
from shardsnap.cli.demo.model import make_model, wrap
from shardsnap.cli.demo.old_policy import VERBS, InPlace, SecondModel
from shardsnap.cli.demo.ranks import Send
from shardsnap.cli.demo.results import Environment, VerbTime, WrapperResult
from shardsnap.cli.demo.settings import Settings, Wrapper
from shardsnap.cli.demo.training import Trained, train


def compare_wrappers(device: torch.device, send: Send, settings: Settings) -> None:
    """Run on every rank; rank 0 sends one (Environment, WrapperResult) per wrapper."""
    for wrapper in settings.wrappers:
        found = compare(wrapper, settings, device)
        if dist.get_rank() == 0:
            send(found)


def compare(wrapper: Wrapper, settings: Settings, device: torch.device) -> tuple[Environment, WrapperResult]:
    """Train the same model three times and compare all that came out of it."""

    def fresh() -> nn.Module:
        return wrap(make_model(settings), wrapper, settings.dtype, device)

    # The reference: neither verl-style helpers nor shardsnap ever see these two models.
    model = fresh()
    reference = train(model, SecondModel(model, fresh()), settings, device)

    model = fresh()
    verl_style = VerlStyleFsdp2(model) if wrapper is Wrapper.FSDP2 else VerlStyleFsdp1(model)
    verl_clock = Clock(device)
    by_verl_style = train(model, InPlace(model, verl_style, verl_clock), settings, device)

    model = fresh()
    dist.barrier()
    started = time.perf_counter()
    shardsnap = Shardsnap(model)
    open_seconds = time.perf_counter() - started
    with shardsnap.service as service:
        helpers: Helpers = FlippedBit(shardsnap, model) if settings.inject_difference else shardsnap
        clock = Clock(device)
        by_shardsnap = train(model, InPlace(model, helpers, clock), settings, device)
        copy_device = ", ".join(service.stats().devices)

    result = WrapperResult(
        wrapper=wrapper.value,
        parameters=sum(parameter.numel() for parameter in make_model(settings).parameters()),
        open_seconds=max(_from_all_ranks(open_seconds)),
        ways={
            "verl-style": _verb_times(verl_clock, settings),
            "shardsnap": _verb_times(clock, settings),
        },
        mini_batches=settings.cycles * settings.mini_batches,
        moved=min(_from_all_ranks(reference.moved)),
        compared=len(reference.tensors),
        differences={
            "verl-style": _differences(by_verl_style, reference),
            "shardsnap": _differences(by_shardsnap, reference),
        },
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Environment(torch.__version__, name, copy_device, torch.get_num_threads()), result


def _verb_times(clock: Clock, settings: Settings) -> dict[str, VerbTime]:
    times: dict[str, VerbTime] = {}
    by_rank: list[dict[str, list[Call]]] = _from_all_ranks(clock.calls)
    for verb in VERBS:
        calls = list(zip(*(calls[verb] for calls in by_rank), strict=True))
        times[verb] = VerbTime(
            calls=len(calls),
            calls_per_cycle=len(calls) // settings.cycles,
            seconds=statistics.median(max(call.seconds for call in same) for same in calls),
            nbytes=max(call.nbytes for same in calls for call in same),
        )
    return times


def _differences(trained: Trained, reference: Trained) -> list[str]:
    """Name what is not equal bit for bit on some rank; whole weights are compared on every rank."""
    assert trained.tensors.keys() == reference.tensors.keys()
    mine = [name for name, tensor in trained.tensors.items() if not _same_bits(tensor, reference.tensors[name])]
    different = {name for names in _from_all_ranks(mine) for name in names}
    return [name for name in reference.tensors if name in different]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # As bytes: torch.equal on floats takes -0.0 for 0.0, and a NaN for different from itself.
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def _from_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
