"""What every wrapper has to live through: the steps of the service's tests, on one rank, against plain references.

References are read through torch alone, never through shardsnap's layouts.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardsnap import SnapshotService, UnsafeStateError
from tests.layout.reading import bytes_of

TOKENS = torch.arange(10).reshape(2, 5)
OTHER_TOKENS = TOKENS.flip(1)

Build = Callable[..., nn.Module]
# Name to (address, bytes) of what this rank holds.
Shards = dict[str, tuple[int, bytes]]


def shards(model: nn.Module) -> Shards:
    """What this rank holds of every parameter and buffer. For FSDP2 it reshards, as state_dict does."""
    found: dict[str, torch.Tensor] = {}
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        for index, unit in enumerate(FullyShardedDataParallel.fsdp_modules(model)):
            if unit._handle is not None:  # a unit whose parameters are all in inner units has none
                flat_param = unit._handle.flat_param
                found[f"flat {index}"] = getattr(flat_param, "_local_shard", flat_param)
        found |= {name: value for name, value in model.named_parameters() if "ignored" in name}
        found |= dict(model.named_buffers())
    else:
        found |= model.state_dict(keep_vars=True)
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: (value.data_ptr(), bytes_of(value)) for name, value in local.items()}


def whole(model: nn.Module) -> dict[str, bytes]:
    """The gathered value of every parameter. Collective."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: bytes_of(parameter) for name, parameter in model.named_parameters()}
    state = model.state_dict()
    return {
        name: bytes_of(value.full_tensor() if isinstance(value, DTensor) else value) for name, value in state.items()
    }


def output_of(model: nn.Module, tokens: torch.Tensor = TOKENS) -> bytes:
    """The output of a forward without gradients, after which FSDP keeps the root gathered."""
    with torch.no_grad():
        result = model(tokens)
    return bytes_of(getattr(result, "logits", result))


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor = TOKENS) -> bytes:
    """One step; the bytes of its loss."""
    result = model(tokens)
    loss = getattr(result, "logits", result).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return bytes_of(loss)


def round_trip(build: Build, options: dict[str, Any], repeatable: bool = True) -> list[str]:
    """Save, train on, restore; then the next step is that of a twin which never trained on. The restored names.

    Not `repeatable`: the wrapper itself does not take the same step twice from the same weights.
    """
    model, twin = build(**options), build(**options)
    optimizer, twin_optimizer = optimizer_of(model), optimizer_of(twin)
    assert train(model, optimizer) == train(twin, twin_optimizer)
    with SnapshotService(model, snapshots=2) as service:
        output = output_of(model)
        assert output_of(twin) == output
        service.save("old")  # FSDP keeps the root gathered at this moment
        saved, saved_whole = shards(model), whole(model)
        moments = copy.deepcopy(optimizer.state_dict())

        for _ in range(2):
            train(model, optimizer, OTHER_TOKENS)
        assert differing(saved, shards(model)), "training did nothing to this rank's weights"
        assert output_of(model) != output

        report = service.restore("old")
        assert output_of(model) == output, "the next forward used stale weights"
        assert shards(model) == saved
        assert whole(model) == saved_whole
        assert (report.skipped, report.converted) == ((), ())

        optimizer.load_state_dict(moments)
        assert train(model, optimizer) == train(twin, twin_optimizer)
        if repeatable:
            assert output_of(model) == output_of(twin)
            assert differing(shards(model), shards(twin)) == []
            assert whole(model) == whole(twin)

        service.save("old")
        stepped = shards(model)
        train(model, optimizer, OTHER_TOKENS)
        service.restore("old")
        assert shards(model) == stepped
        return list(report.restored)


def differing(one: Shards, other: Shards) -> list[str]:
    """The names whose bytes differ, wherever they are."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name][1] != other[name][1]]


def refused_inside(build: Build, options: dict[str, Any], inner: str, plain: str) -> dict[str, list[str]]:
    """Calls both verbs inside forward and backward; training goes on as that of a twin that nobody disturbed.

    `inner` is a submodule, `plain` a parameter that no wrapper manages.
    """
    model, twin = build(**options), build(**options)
    optimizer, twin_optimizer = optimizer_of(model), optimizer_of(twin)
    refusals: dict[str, list[str]] = {}
    with SnapshotService(model, snapshots=2) as service:
        service.save("old")
        saved = shards(model)

        def attempt(when: str) -> None:
            for verb in (service.save, service.restore):
                try:
                    verb("old")
                except UnsafeStateError as error:
                    refusals.setdefault(when, []).append(str(error))

        def in_backward(*arguments: Any) -> Any:
            result = arguments[-1]
            result.register_hook(lambda _: attempt("tensor hook"))
            attempt("forward")

        handles = [
            model.get_submodule(inner).register_forward_hook(in_backward),
            model.get_submodule(inner).register_forward_pre_hook(lambda *_: attempt("forward pre")),
            model.get_parameter(plain).register_post_accumulate_grad_hook(lambda _: attempt("accumulated")),
        ]
        losses = [train(model, optimizer)]
        for handle in handles:
            handle.remove()
        losses.append(train(model, optimizer))
        assert losses == [train(twin, twin_optimizer) for _ in range(2)]
        assert differing(shards(model), shards(twin)) == []
        service.restore("old")
        assert differing(shards(model), saved) == []
        assert service.stats().versions[0].generation == 1  # no attempt replaced it
    return refusals


def check_refusals(answers: list[dict[str, list[str]]]) -> None:
    for refusals in answers:
        assert {when: len(messages) for when, messages in refusals.items()} == dict.fromkeys(
            ("forward pre", "forward", "tensor hook", "accumulated"), 2
        )
        assert all("backward" in message for message in refusals["tensor hook"] + refusals["accumulated"])
        assert all("inside forward" in message for message in refusals["forward"])


def stale_graph(build: Build, options: dict[str, Any]) -> str:
    """What autograd says of a backward through a graph from before a restore that touched wrapped weights only."""
    model = build(**options)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    # Without the ignored weights and the buffer: their versions alone would give the same error.
    with SnapshotService(
        model, snapshots=1, include=["parameters"], select=lambda name, _: "ignored" not in name
    ) as service:
        service.save(0)
        model(TOKENS).float().square().mean().backward()
        optimizer.zero_grad()
        output = model(TOKENS)
        service.restore(0)
        with pytest.raises(RuntimeError) as caught:
            output.float().square().mean().backward()
    return str(caught.value)


def fenced_rounds(build: Build, options: dict[str, Any], rounds: int) -> bool:
    """Every round a step begins while the save may still be reading. Whether a save was seen in flight."""
    model = build(**options)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    in_flight = False
    with SnapshotService(model, snapshots=2) as service:
        service.guard(optimizer)
        for index in range(rounds):
            before = [local(parameter).clone() for parameter in parameters]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            ticket = service.save("before", fence="optimizer")
            in_flight |= not ticket.done()
            optimizer.step()
            assert ticket.done()
            assert not any(torch.equal(b, local(p)) for b, p in zip(before, parameters, strict=True) if b.numel())
            service.restore("before", wait=bool(index % 2))
            assert all(torch.equal(b, local(p)) for b, p in zip(before, parameters, strict=True))
            optimizer.step()
    return in_flight


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part, detached."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def overwrite(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            local(tensor).fill_(7)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as LoRA makes it; sizes do not divide."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_a = nn.Linear(width, 3, bias=False)
        self.lora_b = nn.Linear(3, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.lora_b(self.lora_a(x)))


class Adapters(nn.Sequential):
    """Two of them; the input is made from tokens."""

    def __init__(self) -> None:
        super().__init__(Adapted(), Adapted())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.float()[:, :1] + torch.arange(7.0))


ADAPTER_NAMES = [f"{index}.{name}.weight" for index in range(2) for name in ("lora_a", "lora_b")]


def only_adapters(build: Build) -> tuple[list[str], int, int]:
    """Holds the adapters alone: names, bytes, and the bytes of this rank's adapters as torch counts them."""
    model = build()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    expected = sum(local(parameter).numel() * 4 for parameter in trainable)
    with SnapshotService(model, snapshots=1, select="trainable") as service:
        output = output_of(model)
        ticket = service.save("adapters")
        assert service.stats().versions[0].nbytes == ticket.nbytes
        output_of(model, OTHER_TOKENS)
        saved = shards(model)
        train(model, optimizer, OTHER_TOKENS)
        output_of(model)
        report = service.restore("adapters")
        assert output_of(model) == output
        assert shards(model) == saved
        with torch.no_grad():
            for parameter in frozen:
                local(parameter).add_(1)  # not a snapshot's business
        changed = shards(model)
        train(model, optimizer, OTHER_TOKENS)
        service.restore("adapters")
        assert differing(shards(model), changed) == []
    return list(report.restored), ticket.nbytes, expected


def tiny_llama() -> nn.Module:
    """A Llama of two layers with tied embeddings and random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=18,
        intermediate_size=23,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def compiled_and_checkpointed(net: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wrapped blocks, one compiled and one that checkpoints activations, inside a wrapped and compiled model."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    assert isinstance(net.blocks, nn.ModuleList)
    net.blocks[0] = wrap(torch.compile(net.blocks[0], backend="eager"))
    net.blocks[1] = wrap(checkpoint_wrapper(net.blocks[1]))
    return torch.compile(wrap(net), backend="eager")


@contextlib.contextmanager
def offloading_without_accelerator() -> Iterator[None]:
    """FSDP1's offloading pins and synchronises a stream, neither of which torch can do on the CPU: stand-ins for both.

    A copy, which is what pinning makes, and nothing, as the host is the stream.
    """
    if torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self.clone())
        patch.setattr(torch.cpu.Stream, "synchronize", lambda _: None, raising=False)
        yield


def failure_of(call: Callable[[], object]) -> str:
    """The name of the error's type and its message, or "" where there was none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_group_works() -> None:
    """The default process group still answers."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
