"""Plain models: what is in a layout, what is selected, and when a layout is built again."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardsnap.errors import UnsupportedTensorError
from shardsnap.layout import LayoutCache, layout_of
from tests.layout.reading import by_name, bytes_of, entry_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.square = nn.Parameter(torch.rand(3, 3))
        self.register_parameter("absent", None)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
        self.flat = nn.Parameter(torch.rand(12))
        self.register_buffer("window", self.flat.detach()[4:8])
        self.embed.requires_grad_(False)


def test_every_parameter_and_buffer_is_an_entry() -> None:
    model = Net()
    layout = layout_of(model)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert layout.kind == "plain"
    assert [entry.name for entry in layout.entries] == list(tensors)
    for index, entry in enumerate(layout.entries):
        local = layout.local_tensor(index)
        tensor = tensors[entry.name]
        assert (local.data_ptr(), local.dtype, local.stride()) == (tensor.data_ptr(), tensor.dtype, tensor.stride())
        assert entry.placement == ""
        assert entry.shape == entry.local_shape == tuple(tensor.shape)
        assert entry.local_stride == tensor.stride()
        memory = tensor.detach().as_strided((tensor.numel(),), (1,))
        assert entry_bytes(layout, entry) == bytes_of(memory)
    kinds = {entry.name: entry.kind for entry in layout.entries}
    assert (kinds["conv.bias"], kinds["mask"]) == ("parameter", "buffer")
    entries = by_name(layout)
    assert entries["embed.weight"].region == entries["head.weight"].region
    assert (entries["window"].region, entries["window"].offset) == (entries["flat"].region, 16)
    assert len(layout.hold()) == len(layout.regions) == len(tensors) - 2
    assert {id(tensor) for tensor in layout.versioned} == {id(tensor) for tensor in tensors.values()}
    assert layout.nbytes == sum(t.nbytes for name, t in tensors.items() if name not in ("head.weight", "window"))


@pytest.mark.parametrize(
    ("include", "expected"),
    [(["parameters"], {"parameter"}), ("buffers", {"buffer"}), (("parameters", "buffers"), None)],
)
def test_include(include: list[str], expected: set[str] | None) -> None:
    kinds = {entry.kind for entry in layout_of(Net(), include=include).entries}
    assert kinds == (expected or {"parameter", "buffer"})


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (["embed.*", "norm.b*"], ["embed.weight", "norm.bias"]),
        (["*.weight"], ["embed.weight", "conv.weight", "norm.weight", "head.weight"]),
        (lambda name, tensor: tensor.dtype is torch.bool and name == "mask", ["mask"]),
        ("trainable", ["square", "flat", "conv.weight", "conv.bias", "norm.weight", "norm.bias"]),
    ],
)
def test_select(select: object, expected: list[str]) -> None:
    assert [entry.name for entry in layout_of(Net(), select=select).entries] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["weights"]}, "'weights'.*'parameters', 'buffers'"),
        ({"include": []}, "allowed are 'parameters', 'buffers'"),
        ({"select": "frozen"}, "frozen.*trainable"),
        ({"select": 3}, "allowed are None"),
        ({"select": []}, "allowed are None"),
        ({"select": [3]}, "allowed are None"),
        ({"select": ["lora.*"]}, "matches none of 13 names.*square"),
        ({"select": lambda *_: False}, "matches none"),
    ],
)
def test_wrong_choices_say_what_is_allowed(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(Net(), **arguments)  # type: ignore[arg-type]


def test_what_is_not_selected_need_not_be_copyable() -> None:
    model = Net()
    model.base = nn.Parameter(torch.ones(4, device="meta"), requires_grad=False)
    with pytest.raises(UnsupportedTensorError, match="base: a meta tensor"):
        layout_of(model)
    cache = LayoutCache(model, select="trainable")
    assert cache.current() is cache.current()


CHANGES: dict[str, Callable[[Net], object]] = {
    "data moved": lambda m: setattr(m.square, "data", m.square.data.clone()),
    "data of a tied weight": lambda m: setattr(m.embed.weight, "data", m.embed.weight.data.clone()),
    "parameter replaced": lambda m: setattr(m.norm, "weight", nn.Parameter(m.norm.weight.detach())),
    "parameter added": lambda m: m.register_parameter("new", nn.Parameter(torch.ones(1))),
    "parameter set that was None": lambda m: setattr(m, "absent", nn.Parameter(torch.ones(1))),
    "parameter deleted": lambda m: delattr(m, "square"),
    "parameter renamed": lambda m: (setattr(m, "other", m.square), delattr(m, "square")),
    "buffer replaced": lambda m: setattr(m, "mask", torch.zeros(4, dtype=torch.bool)),
    "module replaced": lambda m: setattr(m, "norm", nn.BatchNorm1d(4)),
    "module added inside": lambda m: m.norm.add_module("inner", nn.Linear(1, 1)),
    "untied": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
    "reshaped in place": lambda m: setattr(m.flat, "data", m.flat.data.view(3, 4)),
    "transposed in place": lambda m: setattr(m.square, "data", m.square.data.t()),
    "reinterpreted in place": lambda m: setattr(m.mask, "data", m.mask.data.view(torch.int8)),
    "another dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layout_is_built_again_when_something_moved(change: str) -> None:
    model = Net()
    cache = LayoutCache(model)
    first = cache.current()
    CHANGES[change](model)
    second = cache.current()
    assert second is not first
    assert cache.current() is second
    fresh = layout_of(model)
    assert (second.regions, second.entries) == (fresh.regions, fresh.entries)


def test_a_layout_is_kept_through_training() -> None:
    model = Net()
    cache = LayoutCache(model)
    first = cache.current()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    (model.square.sum() + model.norm(model.head.weight).sum()).backward()
    optimizer.step()
    model.eval().requires_grad_(False)
    with torch.no_grad():
        model.square.copy_(torch.ones(3, 3))
    assert cache.current() is first
    assert LayoutCache(model).current() is not first


def test_trainable_notices_requires_grad_both_ways() -> None:
    model = Net()
    cache = LayoutCache(model, select="trainable")
    first = cache.current()
    model.embed.requires_grad_(True)
    more = cache.current()
    assert len(more.entries) == len(first.entries) + 2
    model.requires_grad_(False)
    model.square.requires_grad_(True)
    assert [entry.name for entry in cache.current().entries] == ["square"]


def test_a_predicate_is_asked_only_when_built() -> None:
    model = Net()
    asked: list[str] = []
    cache = LayoutCache(model, select=lambda name, _: asked.append(name) is None)
    cache.current()
    count = len(asked)
    assert cache.current() is cache.current()
    assert len(asked) == count
    model.square.data = model.square.data.clone()
    cache.current()
    assert len(asked) == 2 * count


def test_a_layout_keeps_storage_alive_until_it_is_forgotten() -> None:
    model = Net()
    cache = LayoutCache(model)
    layout = weakref.ref(cache.current())
    cache.forget()
    gc.collect()
    assert layout() is None
    assert cache.current().kind == "plain"


def test_a_build_that_raises_leaves_no_stale_layout() -> None:
    model = Net()
    cache = LayoutCache(model)
    cache.current()
    square = model.square
    model.square = nn.Parameter(torch.empty(3, 3, device="meta"))
    for _ in range(2):
        with pytest.raises(UnsupportedTensorError, match="square"):
            cache.current()
    model.square = square
    assert by_name(cache.current())["square"].shape == (3, 3)


def test_ten_thousand_parameters_are_checked_in_a_few_milliseconds() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(5000))
    cache = LayoutCache(model)
    first = cache.current()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        assert cache.current() is first
        best = min(best, time.perf_counter() - start)
    assert best < 0.008, f"{best * 1e3:.2f} ms"  # about 4.2 ms on the machine this was written on
