"""The verbs on plain models in one process, every restore compared bit for bit with clones."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

import shardsnap
from shardsnap import (
    ArenaFullError,
    CopyError,
    LayoutMismatchError,
    SnapshotError,
    SnapshotService,
    UnknownVersionError,
    UnsafeStateError,
    UnsupportedTensorError,
)
from tests.layout.reading import bytes_of
from tests.reference import Kept, bag, every_verb, kept, memory, named_tensors, places, scramble, values

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (*FLOAT8, *INTEGERS, *FLOATS, *COMPLEX, torch.bool)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits; one in 256 values of a float is a NaN or an infinity of whichever payload."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        memory(tensor).random_(0, 2 if dtype is torch.bool else 256)
    return tensor


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def nans() -> torch.Tensor:
    """Quiet and signalling NaNs with payloads, both signs."""
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0x7FFFFFFF, -0x3FFFFF, -1, 0x7FA5A5A5], dtype=torch.int32)
    return bits.view(torch.float32)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7))
    model[1].weight = model[0].weight
    return model


def views(*spans: tuple[int, int]) -> nn.Module:
    base = noise(40)
    return bag(**{f"t{i}": nn.Parameter(base[start:end]) for i, (start, end) in enumerate(spans)})


SORTS: dict[str, Callable[[], nn.Module]] = {
    "permuted": lambda: bag(a=nn.Parameter(noise(3, 4, 5).permute(2, 0, 1)), b=noise(6, 2).t()),
    "channels last": lambda: nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last),
    "no dimension": lambda: bag(a=nn.Parameter(torch.tensor(1.5)), b=torch.tensor(7)),
    "empty": lambda: bag(a=nn.Parameter(torch.empty(0, 3)), b=torch.empty(2, 0), c=torch.ones(1)),
    "NaN payloads": lambda: bag(a=nn.Parameter(nans()), b=noise(5000), c=noise(5000, dtype=torch.bfloat16)),
    "identical views": lambda: views((0, 40), (0, 40)),
    "overlapping views": lambda: views((0, 30), (10, 40), (12, 14)),
    "adjacent views": lambda: views((20, 40), (0, 20)),
    "a view of other values": lambda: bag(a=(a := noise(4, 4)), b=a.view(torch.int32), c=a.view(torch.uint8)[1]),
    "tied": tied,
    "odd offsets": lambda: bag(a=noise(33, dtype=torch.uint8)[3:], b=noise(33, dtype=torch.int16)[1:]),
    "unaligned": lambda: bag(a=torch.frombuffer(bytearray(range(41)), dtype=torch.float32, count=10, offset=1)),
    "many": lambda: nn.Sequential(*(nn.Linear(3, 5) for _ in range(300)), nn.BatchNorm1d(4)),
    "several chunks": lambda: bag(a=noise(3_000_001), b=noise(5, dtype=torch.int8), c=noise(2_500_000)),
    **{str(dtype): (lambda dtype=dtype: bag(a=noise(3, 5, dtype=dtype), b=noise(dtype=dtype))) for dtype in DTYPES},
}


def check_round_trip(model: nn.Module) -> None:
    before, where = kept(model), places(model)
    with SnapshotService(model, 1) as service:
        ticket = service.save("v")
        assert ticket.done()
        scramble(model)
        scrambled = kept(model)
        assert all(scrambled[name] != value for name, value in before.items() if len(value.data) >= 16)
        report = service.restore("v")
        assert kept(model) == before
        assert places(model) == where
        assert report.restored == tuple(before)
        assert report.converted == report.skipped == ()


@pytest.mark.parametrize("sort", SORTS)
def test_every_sort_of_tensor_comes_back_bit_for_bit(sort: str) -> None:
    check_round_trip(SORTS[sort]())


def test_all_sorts_in_one_model() -> None:
    check_round_trip(nn.ModuleDict({sort.replace(".", " "): build() for sort, build in SORTS.items()}))


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


REFUSED = {
    "gaps": lambda: nn.Parameter(torch.ones(4, 4)[:, :2]),
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": quantized,
    "meta": lambda: torch.empty(3, device="meta"),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("sort", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_copied_is_refused_by_name_at_construction(sort: str) -> None:
    model = nn.ModuleDict({"decoder": bag(fine=torch.ones(2), weird=REFUSED[sort]())})
    with pytest.raises(UnsupportedTensorError, match=r"^decoder\.weird: "):
        SnapshotService(model)


def test_a_tensor_that_becomes_uncopyable_is_refused_at_save() -> None:
    model = bag(a=torch.ones(4))
    with SnapshotService(model) as service:
        service.save("v")
        model.a = torch.ones(4, 4)[:, 1]
        with pytest.raises(UnsupportedTensorError, match=r"^a: "):
            service.save("v")
        model.a = torch.zeros(4)
        service.restore("v")
        assert model.a.tolist() == [1, 1, 1, 1]


# ----------------------------------------------------------------------------------------------------- random models


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    tensors: dict[str, torch.Tensor] = {}
    for index in range(draw(st.integers(1, 6))):
        alias = draw(st.sampled_from(["none", "none", "same", "part", "permuted"])) if tensors else "none"
        if alias == "none":
            dtype = draw(st.sampled_from(DTYPES))
            shape = draw(st.lists(st.integers(0, 9), max_size=4))
            start = draw(st.integers(0, 3))  # elements before it in its storage
            flat = noise(start + torch.Size(shape).numel(), dtype=dtype)[start:]
            tensor = flat.reshape(shape).permute(draw(st.permutations(range(len(shape)))))
        else:
            other = draw(st.sampled_from(sorted(tensors)))
            tensor = tensors[other].detach()
            if alias == "permuted":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            if alias == "part" and tensor.numel():
                bounds = sorted(draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
                tensor = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())[slice(*bounds)]
        if tensor.is_floating_point() and draw(st.booleans()):
            tensor = nn.Parameter(tensor)
        tensors[f"t{index}"] = tensor
    return bag(**tensors)


@settings(deadline=None, max_examples=100)
@given(models())
def test_random_models_come_back_bit_for_bit(model: nn.Module) -> None:
    before, where = kept(model), places(model)
    with SnapshotService(model, 1) as service:
        service.save(0)
        scramble(model)
        service.restore(0)
        assert kept(model) == before
        assert places(model) == where


SHAPES = ((3,), (1000,), (40, 50), (0, 4))
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int32)
NAMES = st.sampled_from(["a", "b", "c"])
VERSIONS = st.sampled_from(["x", "y", 1, "1"])


class Verbs(RuleBasedStateMachine):
    """Random verbs, against a dict of clones."""

    def __init__(self) -> None:
        super().__init__()
        self.model = bag(a=torch.randn(3), b=torch.randn(1000), c=torch.randn(40, 50))
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        self.service = SnapshotService(self.model, capacity="40KiB")
        self.service.guard(self.optimizer)
        self.saved: dict[str | int, dict[str, torch.Tensor]] = {}
        self.saves: dict[str | int, int] = {}

    def teardown(self) -> None:
        self.service.close()

    @rule(version=VERSIONS, fence=st.sampled_from(["stream", "optimizer"]))
    def save(self, version: str | int, fence: Any) -> None:
        before = self.service.stats().arena
        self.saves[version] = self.saves.get(version, 0) + 1
        full: ArenaFullError | None = None
        try:
            ticket = self.service.save(version, fence=fence)
        except ArenaFullError as error:
            full = error
        if full is not None:
            assert full.asked > before.largest_free == full.largest_free
            assert full.free == before.free
            return
        ticket.wait()
        assert ticket.generation == self.saves[version]
        self.saved[version] = {name: tensor.clone() for name, tensor in named_tensors(self.model).items()}

    @rule(version=VERSIONS, strict=st.booleans(), wait=st.booleans())
    def restore(self, version: str | int, strict: bool, wait: bool) -> None:
        live, where = kept(self.model), places(self.model)
        if version not in self.saved:
            with pytest.raises(UnknownVersionError):
                self.service.restore(version, strict=strict)
            assert kept(self.model) == live
            return
        saved = self.saved[version]
        tensors = named_tensors(self.model)
        differ = {n for n, t in saved.items() if (t.shape, t.dtype) != (tensors[n].shape, tensors[n].dtype)}
        if strict and differ:
            with pytest.raises(LayoutMismatchError) as caught:
                self.service.restore(version, wait=wait)
            assert all(f"  {name}: saved" in str(caught.value) for name in differ)
            assert kept(self.model) == live
            return
        expected = dict(live)
        for name, tensor in tensors.items():
            if tensor.shape == saved[name].shape:
                value = torch.empty_like(tensor).copy_(saved[name])
                expected[name] = Kept(value.dtype, tuple(value.shape), bytes_of(value))
        report = self.service.restore(version, strict=strict, wait=wait)
        assert kept(self.model) == expected
        assert places(self.model) == where
        assert {difference.name for difference in report.skipped} | set(report.converted) == differ
        assert set(report.restored) == {n for n in saved if saved[n].shape == tensors[n].shape}

    @rule(version=VERSIONS)
    def drop(self, version: str | int) -> None:
        if self.saved.pop(version, None) is None:
            with pytest.raises(UnknownVersionError):
                self.service.drop(version)
        else:
            self.service.drop(version)

    @rule(name=NAMES)
    def mutate(self, name: str) -> None:
        named_tensors(self.model)[name].copy_(torch.randn(1) * 1000)

    @rule(name=NAMES, shape=st.sampled_from(SHAPES), dtype=st.sampled_from(STATE_DTYPES))
    def replace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.model._buffers[name] = (torch.randn(shape) * 100).to(dtype)

    @rule(name=NAMES)
    def reorder(self, name: str) -> None:
        tensor = named_tensors(self.model)[name]
        self.model._buffers[name] = tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor.clone()

    @precondition(lambda self: self.saved)
    @rule()
    def step(self) -> None:
        self.optimizer.step()

    @invariant()
    def versions_are_those_of_the_reference(self) -> None:
        assert set(self.service.versions()) == set(self.saved)
        held = self.service.stats()
        assert {entry.version for entry in held.versions} == set(self.saved)
        assert held.arena.mapped == 40 << 10
        assert sum(entry.nbytes for entry in held.versions) <= held.arena.used <= held.arena.mapped


Verbs.TestCase.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestVerbs = Verbs.TestCase


# ----------------------------------------------------------------------------------------------- strict and not strict


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = parameter(3, 3)
        self.removed = parameter(2)
        self.old_name = parameter(4)
        self.reshaped = parameter(2, 6)
        self.register_buffer("other_dtype", torch.randn(5))


def change(model: nn.Module) -> None:
    model.added = parameter(2)
    del model.removed
    model.new_name = model.old_name
    del model.old_name
    model.reshaped = parameter(6, 2)
    model.other_dtype = torch.randn(5).bfloat16()


def test_strict_lists_every_difference_and_changes_nothing() -> None:
    model = Before()
    with SnapshotService(model) as service:
        service.save("v")
        change(model)
        before = kept(model)
        with pytest.raises(LayoutMismatchError) as caught:
            service.restore("v")
        assert kept(model) == before
        lines = str(caught.value).splitlines()
        assert lines[0] == "the snapshot 'v' does not fit the live model; 6 difference(s):"
        assert sorted(lines[1:7]) == [
            "  added: in the live model, not in the snapshot",
            "  new_name: in the live model, not in the snapshot",
            "  old_name: in the snapshot, not in the live model",
            "  other_dtype: saved as torch.float32, live torch.bfloat16",
            "  removed: in the snapshot, not in the live model",
            "  reshaped: saved with shape (2, 6), live (6, 2)",
        ]
        assert "strict=False" in lines[7]
        service.save("w")
        service.restore("w")


def test_not_strict_reports_what_was_done() -> None:
    model = Before()
    with SnapshotService(model) as service:
        saved = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
        service.save("v")
        change(model)
        scramble(model)
        before = kept(model)
        report = service.restore("v", strict=False)
        after = kept(model)
        assert after["same"].data == bytes_of(saved["same"])
        assert after["other_dtype"].data == bytes_of(saved["other_dtype"].bfloat16())
        assert all(after[name] == before[name] for name in ("added", "new_name", "reshaped"))
        assert report.restored == ("same", "other_dtype")
        assert report.converted == ("other_dtype",)
        assert {(difference.name, difference.kind) for difference in report.skipped} == {
            ("added", "missing"),
            ("new_name", "missing"),
            ("reshaped", "shape"),
            ("removed", "unexpected"),
            ("old_name", "unexpected"),
        }
        assert report.nbytes == 9 * 4 + 5 * 2
        assert "converted other_dtype; skipped " in str(report)


CONVERSIONS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.int32, torch.float32),
    (torch.float32, torch.int64),
    (torch.int64, torch.int8),
    (torch.bool, torch.float32),
    (torch.float32, torch.bool),
    (torch.complex64, torch.complex128),
    (torch.float32, torch.complex64),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float8_e5m2, torch.float32),
]


@pytest.mark.parametrize(("saved", "live"), CONVERSIONS)
def test_dtypes_are_converted_as_copy_does(saved: torch.dtype, live: torch.dtype) -> None:
    values = (torch.randn(257, 3) * 50).to(saved).t()
    model = bag(pad=torch.zeros(1, dtype=torch.int8), x=values.clone())
    with SnapshotService(model) as service:
        service.save("v")
        model.x = torch.zeros(3, 257, dtype=live)
        report = service.restore("v", strict=False)
        expected = torch.empty(3, 257, dtype=live).copy_(values)
        assert bytes_of(model.x) == bytes_of(expected)
        assert report.converted == ("x",)


@pytest.mark.parametrize("to_channels_last", [False, True])
def test_another_memory_order_is_the_same_weight(to_channels_last: bool) -> None:
    formats = (torch.contiguous_format, torch.channels_last)
    model = nn.Conv2d(3, 4, 5).to(memory_format=formats[not to_channels_last])
    before = kept(model)
    with SnapshotService(model) as service:
        service.save("v")
        scramble(model)
        model.weight = nn.Parameter(model.weight.detach().clone(memory_format=formats[to_channels_last]))
        strides = model.weight.stride()
        report = service.restore("v")
        assert kept(model) == before
        assert model.weight.stride() == strides
        assert report.restored == ("weight", "bias")
        assert report.converted == ()


def test_a_tie_that_was_broken_restores_both() -> None:
    model = tied()
    before = kept(model)
    with SnapshotService(model) as service:
        service.save("v")
        model[1].weight = parameter(7, 3)
        scramble(model)
        report = service.restore("v")
        assert kept(model) == before
        assert model[0].weight.data_ptr() != model[1].weight.data_ptr()
        assert report.restored == tuple(before)


def test_a_tie_that_was_made_is_a_difference() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7))
    first = bytes_of(model[0].weight)
    with SnapshotService(model) as service:
        service.save("v")
        model[1].weight = model[0].weight
        scramble(model)
        before = kept(model)
        with pytest.raises(LayoutMismatchError, match=r"1\.weight: shares its bytes with 0\.weight"):
            service.restore("v")
        assert kept(model) == before
        report = service.restore("v", strict=False)
        assert bytes_of(model[1].weight) == first
        assert [(d.name, d.kind) for d in report.skipped] == [("1.weight", "tied")]


def test_weights_that_came_to_overlap_are_a_difference() -> None:
    model = bag(a=torch.zeros(10), b=torch.ones(10), c=torch.ones(3))
    with SnapshotService(model) as service:
        service.save("v")
        base = torch.full((15,), 7.0)
        model.a, model.b = base[5:], base[:10]
        with pytest.raises(LayoutMismatchError, match=r"\n  b: shares its bytes with a "):
            service.restore("v")
        assert base.unique().tolist() == [7]
        service.restore("v", strict=False)
        assert base.tolist() == [7] * 5 + [0] * 10


# -------------------------------------------------------------------------------------------------- include and select


def frozen_net() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"include": ("parameters",)}, ["0.weight", "0.bias", "1.weight", "1.bias"]),
        ({"include": ("buffers",)}, ["1.running_mean", "1.running_var", "1.num_batches_tracked"]),
        ({"select": "trainable"}, ["0.bias", "1.weight", "1.bias"]),
        ({"select": ["*.bias", "0.*"]}, ["0.weight", "0.bias", "1.bias"]),
        ({"select": lambda name, tensor: tensor.dim() == 1 and name[0] == "0"}, ["0.bias"]),
    ],
)
def test_only_what_was_chosen_is_saved_and_restored(arguments: dict[str, Any], expected: list[str]) -> None:
    model = frozen_net()
    before = kept(model)
    with SnapshotService(model, **arguments) as service:
        service.save("v")
        scramble(model)
        scrambled = kept(model)
        assert service.restore("v").restored == tuple(expected)
        assert kept(model) == {name: before[name] if name in expected else scrambled[name] for name in before}
        assert service.stats().versions[0].nbytes == sum(len(before[name].data) for name in expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"snapshots": 0}, ValueError, "at least 1"),
        ({"snapshots": -1}, ValueError, "at least 1"),
        ({"snapshots": True}, ValueError, "at least 1"),
        ({"snapshots": 1.5}, ValueError, "at least 1"),
        ({"snapshots": "2"}, ValueError, "at least 1"),
        ({"snapshots": 1, "capacity": 10}, ValueError, "not both"),
        ({"capacity": "lots"}, ValueError, "lots"),
        ({"capacity": -1}, ValueError, "negative"),
        ({"growth": "1 lightyear"}, ValueError, "lightyear"),
        ({"pin": "maybe"}, ValueError, "maybe"),
        ({"include": ()}, ValueError, "include"),
        ({"include": ("gradients",)}, ValueError, "gradients"),
        ({"select": ["nothing*"]}, ValueError, "matches none"),
        ({"select": 7}, ValueError, "select is 7"),
        ({"model": torch.ones(2)}, TypeError, "torch.nn.Module"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SnapshotService(**{"model": frozen_net(), **arguments})


@pytest.mark.parametrize("version", [True, False, None, 1.5, b"v", ("v",)])
@pytest.mark.parametrize("verb", ["save", "restore", "drop"])
def test_a_version_is_a_str_or_an_int(verb: str, version: Any) -> None:
    with SnapshotService(nn.Linear(1, 1)) as service, pytest.raises(TypeError, match="a version is a str or an int"):
        getattr(service, verb)(version)


def test_one_and_its_text_are_two_versions() -> None:
    model = bag(a=torch.tensor(1))
    with SnapshotService(model) as service:
        service.save(1)
        model.a.fill_(2)
        service.save("1")
        assert service.versions() == (1, "1")
        service.restore(1)
        assert model.a == 1
        service.drop(1)
        assert service.versions() == ("1",)
        service.restore("1")
        assert model.a == 2


@pytest.mark.parametrize("verb", ["restore", "drop"])
def test_an_unknown_version_is_a_readable_key_error(verb: str) -> None:
    with SnapshotService(nn.Linear(1, 1)) as service:
        for known in ("none", "'a', 3"):
            with pytest.raises(KeyError) as caught:
                getattr(service, verb)("gone")
            assert isinstance(caught.value, UnknownVersionError)
            assert str(caught.value) == f"no snapshot 'gone' is held; held versions: {known}"
            if not service.versions():
                service.save("a")
                service.save(3)


# ------------------------------------------------------------------------------------------------------------ the arena


def test_a_full_arena_says_who_holds_what_and_nothing_is_lost() -> None:
    model = bag(a=torch.zeros(2048))
    with SnapshotService(model, 2) as service:
        for version in (1, 2):
            model.a.fill_(version)
            service.save(version)
        model.a.fill_(3)
        with pytest.raises(ArenaFullError) as caught:
            service.save("third")
        error = caught.value
        assert isinstance(error, MemoryError)
        assert (error.asked, error.free, error.largest_free) == (8192, 0, 0)
        text = str(error)
        assert text.startswith("no room to save 'third': the arena has no room for 8.00 KiB (8192 bytes)")
        assert "Held: 1 8.00 KiB, 2 8.00 KiB." in text
        with pytest.raises(ArenaFullError):
            service.save(1)
        assert service.versions() == (1, 2)
        for version in (1, 2):
            service.restore(version)
            assert model.a.unique() == version
        model.a.fill_(3)
        service.drop(2)
        service.save("third")
        model.a.fill_(0)
        service.restore("third")
        assert model.a.unique() == 3


def test_a_failed_save_over_a_version_keeps_it() -> None:
    model = bag(a=torch.ones(2048))
    with SnapshotService(model, 1) as service:
        first = service.save("v")
        model.a.fill_(2)
        with pytest.raises(ArenaFullError, match="needs room for both"):
            service.save("v")
        assert service.restore("v").generation == first.generation
        assert model.a.unique() == 1
        service.drop("v")
        assert service.save("v").generation == 3


def test_growth_is_mapped_when_needed_and_given_back() -> None:
    model = bag(a=torch.zeros(2048))
    with SnapshotService(model, 1, growth="8KiB") as service:
        assert service.stats().arena.limit == 16384
        service.save(1)
        assert service.stats().arena.mapped == 8192
        model.a.fill_(1)
        service.save(2)
        assert (service.stats().arena.mapped, service.stats().arena.slabs) == (16384, 2)
        with pytest.raises(ArenaFullError):
            service.save(3)
        service.drop(2)
        assert (service.stats().arena.mapped, service.stats().arena.slabs) == (8192, 1)
        service.restore(1)
        assert model.a.unique() == 0


def test_capacity_as_text() -> None:
    with SnapshotService(nn.Linear(2, 2), capacity="64 KiB") as service:
        arena = service.stats().arena
        assert (arena.limit, arena.mapped, arena.free, arena.largest_free) == (65536,) * 4
        assert (arena.used, arena.pinned, arena.slabs) == (0, 0, 1)


def test_a_host_without_the_memory_is_an_error() -> None:
    with pytest.raises(ArenaFullError, match="too little host memory"):
        SnapshotService(nn.Linear(2, 2), capacity="900TiB")


def test_host_memory_is_at_most_one_percent_more_than_the_bytes() -> None:
    model = nn.ParameterList(parameter(12_345 + index) for index in range(1000))
    nbytes = sum(tensor.nbytes for tensor in model)
    assert nbytes > 50e6
    with SnapshotService(model, 2) as service:
        for version in (1, 2):
            service.save(version)
            arena = service.stats().arena
            assert nbytes * version <= arena.used <= 1.01 * nbytes * version
            assert nbytes * 2 <= arena.mapped <= 1.01 * nbytes * 2


def test_a_steady_state_allocates_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = torch.optim.Adam(model.parameters())
    with SnapshotService(model, 1) as service:
        service.save("v")
        extent = service._held["v"].current.extent.address
        layout, plan, arena, where = service._layouts.current(), service._plan, service.stats().arena, places(model)
        for _ in range(5):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            service.restore("v")
            service.drop("v")
            service.save("v")
            assert service._held["v"].current.extent.address == extent
        assert service._layouts.current() is layout
        assert service._plan is plan
        assert service.stats().arena == arena
        assert places(model) == where


def test_stats_count() -> None:
    model = bag(a=torch.zeros(100), b=torch.zeros(3, dtype=torch.int8))
    with SnapshotService(model) as service:
        service.save("v")
        service.save("v")
        service.save("w")
        service.restore("v")
        stats = service.stats()
        assert [(v.version, v.generation, v.nbytes, v.in_flight) for v in stats.versions] == [
            ("v", 2, 403, False),
            ("w", 1, 403, False),
        ]
        assert (stats.saves, stats.restores, stats.bytes_saved, stats.bytes_restored) == (3, 1, 1209, 403)
        assert stats.copies_in_flight == 0
        assert stats.save_seconds > 0 < stats.restore_seconds
        assert stats.arena.used == 8192
        assert len(stats.devices) == 1


# --------------------------------------------------------------------------------------------- autograd and optimizers


def test_a_graph_built_before_a_restore_raises_at_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with SnapshotService(model) as service:
        service.save("v")
        loss = model(torch.randn(2, 3)).sum()
        versions = [tensor._version for tensor in model.parameters()]
        service.restore("v")
        assert [tensor._version for tensor in model.parameters()] == [version + 1 for version in versions]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(torch.randn(2, 3)).sum().backward()


def test_save_leaves_a_graph_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with SnapshotService(model) as service:
        loss = model(torch.randn(2, 3)).sum()
        service.save("v")
        loss.backward()


def test_training_goes_on_after_a_restore_as_if_it_had_never_left() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, service: SnapshotService | None) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            if service is not None:
                service.save("live")
                scramble(model)
                service.restore("live")
            model(torch.randn(4, 6, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    twin = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    twin.load_state_dict(model.state_dict())
    train(twin, torch.optim.AdamW(twin.parameters()), None)
    with SnapshotService(model) as service:
        train(model, torch.optim.AdamW(model.parameters()), service)
    assert kept(model) == kept(twin)


@pytest.mark.parametrize("strict", [True, False])
def test_models_of_inference_tensors(strict: bool) -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4)
        with SnapshotService(model) as service:
            before = kept(model)
            service.save("v")
            scramble(model)
            service.restore("v", strict=strict)
            assert kept(model) == before


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Every step adds 1 to every weight."""
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, -1.0)
    return torch.optim.SGD(model.parameters(), lr=1.0)


def test_the_optimizer_fence_needs_a_guard() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    with SnapshotService(model) as service:
        for _ in range(2):
            with pytest.raises(SnapshotError, match=r"call guard\(optimizer\) first"):
                service.save("v", fence="optimizer")
            assert service.versions() == ()
            handle = service.guard(optimizer)
            service.save("v", fence="optimizer").wait()
            service.drop("v")
            handle.remove()
        with pytest.raises(ValueError, match="fence must be"):
            service.save("v", fence="none")  # type: ignore[arg-type]


def test_a_step_right_after_a_save_does_not_reach_the_snapshot() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1 << 20)) for _ in range(12))
    optimizer = sgd(model)
    with SnapshotService(model, 2) as service:
        service.guard(optimizer)
        for round_ in range(8):
            ticket = service.save(round_ % 2, fence="optimizer")
            optimizer.step()
            assert ticket.done()
            assert values(model) == {round_ + 1}
            service.restore(round_ % 2)
            assert values(model) == {round_}
            optimizer.step()
            service.drop(round_ % 2)


def test_a_restore_right_after_a_save_does_not_reach_the_snapshot() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1 << 20)) for _ in range(12))
    optimizer = sgd(model)
    with SnapshotService(model, 2) as service:
        service.guard(optimizer)
        service.save("zero")
        optimizer.step()
        for _ in range(5):
            service.save("one", fence="optimizer")
            service.restore("zero")
            assert values(model) == {0}
            service.restore("one")
            assert values(model) == {1}
            service.drop("one")


def test_fence_waits_for_every_save() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1 << 21)) for _ in range(4))
    with SnapshotService(model, 3) as service:
        optimizer = sgd(model)
        service.guard(optimizer)
        tickets = [service.save(version, fence="optimizer") for version in range(3)]
        service.fence()
        assert all(ticket.done() for ticket in tickets)
        assert not any(version.in_flight for version in service.stats().versions)


@pytest.mark.parametrize("end", ["remove", "close"])
def test_a_guard_ends_with_its_handle_and_with_the_service(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    fences: list[int] = []
    monkeypatch.setattr(SnapshotService, "fence", lambda _: fences.append(1))
    service = SnapshotService(model)
    handle = service.guard(optimizer)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert len(fences) == 2
    handle.remove() if end == "remove" else service.close()
    optimizer.step()
    assert len(fences) == 2
    assert not optimizer._optimizer_step_pre_hooks
    service.close()


def test_an_optimizer_does_not_keep_the_service_alive() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    service = SnapshotService(model)
    service.guard(optimizer)
    alive = weakref.ref(service)
    del service
    gc.collect()
    assert alive() is None
    optimizer.step()


# --------------------------------------------------------------------------------------------------- unsafe and failed


@pytest.mark.parametrize("verb", ["save", "restore"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_inside_forward_and_backward_is_refused(verb: str, where: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with SnapshotService(model) as service:
        service.save("v")
        before = kept(model)
        refused: list[str] = []

        def attempt(*_: object) -> None:
            with pytest.raises(UnsafeStateError, match=f"inside a {where}") as caught:
                getattr(service, verb)("v")
            refused.append(str(caught.value))

        if where == "forward":
            model[0].register_forward_hook(attempt)
            model(torch.randn(1, 3))
        else:
            output = model(torch.randn(1, 3))
            output.register_hook(attempt)
            output.sum().backward()
        assert len(refused) == 1
        assert kept(model) == before
        assert service.stats().versions[0].generation >= 1


def test_a_forward_around_an_idle_model_may_save_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.own = nn.Linear(2, 2)
            self.service = SnapshotService(self.inner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.service.save("v")
            scramble(self.inner)
            self.service.restore("v")
            return self.own(x)

    outer = Outer()
    before = kept(outer.inner)
    outer(torch.randn(1, 2))
    assert kept(outer.inner) == before
    outer.service.close()


class Failed:
    """A copy of the core that failed in flight."""

    bytes = 1

    def done(self) -> bool:
        return True

    def wait(self, _: float | None = None) -> bool:
        raise CopyError("CUDA_ERROR_OF_A_TEST")

    def error(self) -> str | None:
        return "CUDA_ERROR_OF_A_TEST"


class Failing:
    """An engine whose saves or restores fail."""

    def __init__(self, engine: Any, verb: str) -> None:
        self._engine, self._verb = engine, verb

    def __getattr__(self, name: str) -> Any:
        if name == self._verb:
            return lambda *_, **__: Failed()
        return getattr(self._engine, name)


@pytest.fixture
def holding() -> Iterator[tuple[nn.Module, SnapshotService, torch.device]]:
    model = bag(a=torch.ones(100))
    optimizer = torch.optim.SGD([parameter(1)])
    with SnapshotService(model) as service:
        service.guard(optimizer)
        service.save("v")
        model.a.fill_(2)
        yield model, service, torch.device("cpu")


def test_a_save_that_fails_in_flight_is_told_once_and_leaves_the_one_before(
    holding: tuple[nn.Module, SnapshotService, torch.device],
) -> None:
    model, service, device = holding
    engine = service._engines[device]
    service._engines[device] = Failing(engine, "save")  # type: ignore[assignment]
    ticket = service.save("v", fence="optimizer")
    service._engines[device] = engine
    with pytest.raises(CopyError, match="CUDA_ERROR_OF_A_TEST"):
        ticket.wait()
    assert "failed" in repr(ticket)
    with pytest.raises(CopyError, match=r"generation 2\) failed: CUDA_ERROR_OF_A_TEST; the save before it is intact"):
        service.restore("v")
    assert model.a.unique() == 2
    assert service.restore("v").generation == 1
    assert model.a.unique() == 1
    assert service.stats().arena.used == 4096


def test_weights_that_a_failed_restore_may_have_mixed_are_not_saved(
    holding: tuple[nn.Module, SnapshotService, torch.device],
) -> None:
    model, service, device = holding
    engine = service._engines[device]
    service._engines[device] = Failing(engine, "restore")  # type: ignore[assignment]
    with pytest.raises(CopyError, match="CUDA_ERROR_OF_A_TEST"):
        service.restore("v")
    service._engines[device] = engine
    for _ in range(2):
        with pytest.raises(CopyError, match="the weights may be mixed"):
            service.save("w")
    service.restore("v")
    assert model.a.unique() == 1
    service.save("w")


def test_closing_twice_and_verbs_after_it() -> None:
    model = nn.Linear(2, 2)
    service = SnapshotService(model)
    service.save("v")
    with service:
        pass
    service.close()
    optimizer = sgd(model)
    for verb in every_verb(service, optimizer):
        with pytest.raises(SnapshotError, match="the service is closed"):
            verb()


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_model_with_tied_embeddings() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3ForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad(), shardsnap.SnapshotService(model) as service:
        before, logits = kept(model), model(tokens).logits
        ticket = service.save("pi_old")
        assert ticket.nbytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
        assert not torch.equal(model(tokens).logits, logits)
        service.restore("pi_old")
        assert kept(model) == before
        assert torch.equal(model(tokens).logits, logits)
