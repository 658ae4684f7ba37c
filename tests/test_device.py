"""Which copy device serves a model, and what the environment says about it."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from shardsnap import DeviceUnavailableError, SnapshotService
from shardsnap.device import (
    BACKEND_VARIABLE,
    LIBRARY_VARIABLE,
    THREADS_VARIABLE,
    caller_stream,
    chunk_bytes,
    host_is_stream,
    open_copy_device,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BACKEND_VARIABLE, LIBRARY_VARIABLE, THREADS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_copy_threads(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, str(count))
    before = threads()
    device = open_copy_device(CPU)
    assert threads() - before == count
    assert device.describe().startswith(f"cpu ({count} copy threads, ")
    del device
    assert threads() == before


def test_a_copy_thread_a_core() -> None:
    usable = min(16, len(os.sched_getaffinity(0)))
    with SnapshotService(nn.Linear(1, 1)) as service:
        (text,) = service.stats().devices
        assert text.startswith(f"cpu ({usable} copy threads, ")
        assert (service.stats().arena.pinned, service.stats().arena.pin_failure) == (0, "")


@pytest.mark.parametrize("count", ["two", "-1", "1.5", " ", "²"])
def test_a_number_of_threads_that_is_none(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, count)
    with pytest.raises(ValueError, match=rf"SHARDSNAP_COPY_THREADS must be a number of threads, got '{count}'"):
        SnapshotService(nn.Linear(1, 1))


def test_an_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "rocm")
    with pytest.raises(ValueError, match=r"SHARDSNAP_BACKEND must be .* got 'rocm'"):
        SnapshotService(nn.Linear(1, 1))


def test_the_cpu_backend_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "cpu")
    assert open_copy_device(CPU).describe().startswith("cpu (")


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nowhere/libcuda.so.1")
    with pytest.raises(DeviceUnavailableError, match=r"cannot load the CUDA driver /nowhere/libcuda\.so\.1: .*"):
        SnapshotService(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_other_accelerators_are_refused(kind: str) -> None:
    with pytest.raises(DeviceUnavailableError, match=f"no copy backend for tensors on {kind}"):
        open_copy_device(torch.device(kind))


def test_the_host_is_the_stream_of_a_cpu_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_is_stream(CPU)
    assert not host_is_stream(torch.device("cuda", 1))
    assert caller_stream(CPU) == 0
    assert chunk_bytes(CPU) < chunk_bytes(torch.device("cuda"))
    monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
    assert chunk_bytes(CPU) == chunk_bytes(torch.device("cuda"))
    assert host_is_stream(CPU)


def test_pinning_cannot_be_required_of_a_cpu_model() -> None:
    from shardsnap import PinningError

    with pytest.raises(PinningError):
        SnapshotService(nn.Linear(1, 1), pin="require")
    with SnapshotService(nn.Linear(1, 1), pin="never") as service:
        assert service.stats().arena.pinned == 0


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (BACKEND_VARIABLE, LIBRARY_VARIABLE, THREADS_VARIABLE):
        monkeypatch.setenv(variable, "")
    assert open_copy_device(CPU).describe().startswith("cpu (")
