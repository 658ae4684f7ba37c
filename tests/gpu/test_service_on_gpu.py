"""The service on one GPU: what it copies, bit for bit, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardsnap import LayoutMismatchError, SnapshotService, UnknownVersionError
from tests.emulator.test_service_emulated import Mixed
from tests.gpu.device import DEVICE, ON_GPU, SECONDS, Marked, addresses, bytes_of, gpu, kept, needs_streams
from tests.reference import bag, named_tensors, scramble

pytestmark = gpu

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]
ELEMENTS = (0, 1, 3, 255, 4097, (1 << 20) + 1)


def neighbours() -> nn.Module:
    """Views of one tensor, some of which start at odd bytes, and one whose elements are in another order."""
    joined = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)
    views = {f"part{start}": joined[start : start + 97] for start in range(1, 1 << 15, 97)}
    return bag(**views, turned=torch.zeros(33, 65, device=DEVICE).t())


@pytest.mark.parametrize("build", [lambda: Mixed().to(DEVICE), neighbours], ids=["mixed", "neighbours"])
def test_versions_come_back_bit_for_bit(build: Callable[[], nn.Module]) -> None:
    model = build()
    where = addresses(model)
    with SnapshotService(model, snapshots=4) as service:
        if ON_GPU:
            assert service.stats().devices[0].startswith("cuda:0 (")
        saved = {}
        for version in range(3):
            scramble(model)
            saved[version] = kept(model)
            ticket = service.save(version)
            ticket.wait(SECONDS)
            assert ticket.error is None
        assert saved[0] != saved[1] != saved[2]
        for version in (1, 2, 0, 0, 2):
            scramble(model)
            assert kept(model) != saved[version]
            report = service.restore(version)
            assert kept(model) == saved[version]
            assert set(report.restored) == set(saved[version])

        scramble(model)
        newer = kept(model)
        service.save(1)
        scramble(model)
        service.restore(1)
        assert kept(model) == newer, "the newer save of a version did not replace the older one"
        service.restore(0)
        assert kept(model) == saved[0], "replacing a version changed another one"

        service.drop(1)
        with pytest.raises(UnknownVersionError):
            service.restore(1)
        assert service.versions() == (0, 2)
        assert kept(model) == saved[0]
    assert addresses(model) == where


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_size(dtype: torch.dtype) -> None:
    model = bag(**{f"of{count}": torch.zeros(count, dtype=dtype, device=DEVICE) for count in ELEMENTS})
    scramble(model)
    saved = kept(model)
    with SnapshotService(model, snapshots=1) as service:
        service.save("v")
        scramble(model)
        assert kept(model) != saved
        service.restore("v")
    assert kept(model) == saved


def test_tensors_of_many_chunks() -> None:
    sizes = ((100 << 20) + 3, 32 << 20, (32 << 20) + 1, (64 << 20) - 1)
    model = bag(**{f"of{size}": torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in sizes})
    scramble(model)
    saved = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    with SnapshotService(model, snapshots=1) as service:
        service.save("v")
        scramble(model)
        service.restore("v")
    for name, tensor in named_tensors(model).items():
        assert torch.equal(tensor, saved[name]), name


def test_many_small_tensors() -> None:
    """More than one batch of copies."""
    model = bag(**{f"b{index}": torch.zeros(256, device=DEVICE) for index in range(3000)})
    scramble(model)
    saved = [tensor.clone() for tensor in named_tensors(model).values()]
    with SnapshotService(model, snapshots=1) as service:
        service.save("v")
        scramble(model)
        service.restore("v")
    raw = [tensor.view(torch.int32) for tensor in named_tensors(model).values()]
    assert torch.equal(torch.cat(raw), torch.cat([tensor.view(torch.int32) for tensor in saved]))


def test_several_saves_in_flight() -> None:
    model = Marked()
    with SnapshotService(model, snapshots=7) as service:
        tickets = []
        for version in range(6):
            model.mark(version)
            tickets.append(service.save(version))
        assert service.versions() == tuple(range(6))
        for ticket in reversed(tickets):
            ticket.wait(SECONDS)
            assert ticket.done()
            assert ticket.error is None
            assert ticket.nbytes == sum(weight.nbytes for weight in model.weights)
        assert service.stats().copies_in_flight == 0
        for version in (5, 0, 3):
            service.restore(version)
            assert model.values() == {version}


def test_a_save_in_flight_can_be_restored_replaced_and_dropped() -> None:
    model = Marked()
    with SnapshotService(model, snapshots=5) as service:
        for index in range(1, 9):
            model.mark(index)
            service.save("v")
            model.mark(-index)
            service.restore("v", wait=bool(index % 2))
            assert model.values() == {index}
            service.save("w")
            service.drop("w")
        assert service.versions() == ("v",)


def guarded_rounds(rounds: int) -> bool:
    """Every round a step is enqueued while the save may still be reading; whether a save was seen in flight."""
    model = Marked()
    model.mark(0)
    for weight in model.weights:
        weight.grad = torch.full_like(weight, -1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    in_flight = False
    with SnapshotService(model, snapshots=2) as service:
        service.guard(optimizer)
        for index in range(rounds):
            ticket = service.save("before", fence="optimizer")
            in_flight |= not ticket.done()
            optimizer.step()
            assert model.values() == {index + 1}
            service.restore("before", wait=bool(index % 2))
            assert model.values() == {index}, "the step overwrote weights that the save was still to read"
            optimizer.step()
    return in_flight


def test_a_guarded_step_waits_for_the_save() -> None:
    in_flight = guarded_rounds(12)
    assert in_flight or not ON_GPU, "no save was ever in flight, so nothing was put to the test"


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_converted_as_copy_does(other: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(129, 65), nn.BatchNorm1d(65)).to(DEVICE)
    saved = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    with SnapshotService(model, snapshots=1) as service:
        service.save("v")
        model.to(other)
        scramble(model)
        changed = kept(model)
        with pytest.raises(LayoutMismatchError) as caught:
            service.restore("v")
        assert "0.weight" in str(caught.value)
        assert kept(model) == changed, "a refused restore changed weights"
        report = service.restore("v", strict=False)
    assert "0.weight" in report.converted
    for name, tensor in named_tensors(model).items():
        assert bytes_of(tensor) == bytes_of(torch.empty_like(tensor).copy_(saved[name])), name


def test_a_mismatch_leaves_every_weight_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16)).to(DEVICE)
    with SnapshotService(model, snapshots=2) as service:
        service.save("v")
        model[1] = nn.Linear(32, 17).to(DEVICE)
        scramble(model)
        before = kept(model)
        with pytest.raises(LayoutMismatchError) as caught:
            service.restore("v")
        assert "1.weight" in str(caught.value)
        assert "1.bias" in str(caught.value)
        assert kept(model) == before
        report = service.restore("v", strict=False)
        after = kept(model)
        assert {difference.name for difference in report.skipped} == {"1.weight", "1.bias"}
        assert {name for name in before if before[name] == after[name]} == {"1.weight", "1.bias"}


@needs_streams
def test_the_arena_can_be_pinned() -> None:
    model = Marked()
    with SnapshotService(model, snapshots=2, pin="require") as service:
        arena = service.stats().arena
        assert arena.pinned == arena.mapped > 0
        assert arena.pin_failure == ""


def test_pageable_memory_serves_as_well() -> None:
    model = Marked()
    with SnapshotService(model, snapshots=2, pin="never") as service:
        assert service.stats().arena.pinned == 0
        for index in range(3):
            model.mark(index)
            service.save("v")
            model.mark(-1)
            service.restore("v")
            assert model.values() == {index}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> bytes:
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return bytes_of(loss)


def test_training_goes_on_as_that_of_a_twin_that_was_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).to(DEVICE)
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
    with SnapshotService(model, snapshots=2) as service:
        for seed in range(6):
            assert step(model, optimizer, seed) == step(twin, twin_optimizer, seed)
            service.save("live")
            step(model, optimizer, seed + 100)
            assert kept(model) != kept(twin)
            service.restore("live", wait=bool(seed % 2))
            assert kept(model) == kept(twin)


def test_a_graph_from_before_a_restore_is_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(DEVICE)
    with SnapshotService(model, snapshots=1) as service:
        service.save("v")
        output = model(torch.ones(4, 16, device=DEVICE))
        service.restore("v")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_only_adapters_are_held() -> None:
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 4)).to(DEVICE)
    with SnapshotService(model, snapshots=1, select="trainable") as service:
        saved = kept(model)
        ticket = service.save("v")
        assert ticket.nbytes == sum(parameter.nbytes for parameter in model[1].parameters())
        scramble(model)
        changed = kept(model)
        service.restore("v")
        after = kept(model)
    assert {name for name in after if after[name] == saved[name]} == {"1.weight", "1.bias"}
    assert {name for name in after if after[name] == changed[name]} == {"0.weight", "0.bias"}
