"""Machines without a GPU or its driver."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

from shardsnap import DeviceUnavailableError, SnapshotService
from shardsnap.device import open_copy_device
from tests.emulator.processes import Processes
from tests.reference import kept, scramble

NO_DRIVER: dict[str, str | None] = {
    "CUDA_VISIBLE_DEVICES": "",
    "SHARDSNAP_BACKEND": None,
    "SHARDSNAP_LIBCUDA": None,
}


def driver_installed() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def error_of_cuda_device() -> str:
    with pytest.raises(DeviceUnavailableError) as caught:
        open_copy_device(torch.device("cuda:0"))
    return str(caught.value)


def test_a_gpu_that_is_not_there_is_explained(processes: Processes) -> None:
    (message,) = processes.run(1, NO_DRIVER, error_of_cuda_device)
    if driver_installed():
        assert "CUDA_ERROR_NO_DEVICE" in message
        assert 'CUDA_VISIBLE_DEVICES is ""' in message
    else:
        assert "libcuda.so.1: cannot open shared object file" in message
        assert "Install the NVIDIA driver" in message


def cpu_model() -> str:
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400))
    with SnapshotService(model, snapshots=1) as service:
        saved = kept(model)
        service.save("old")
        scramble(model)
        service.restore("old")
        assert kept(model) == saved
        return service.stats().devices[0]


def test_models_on_the_cpu_need_no_driver(processes: Processes) -> None:
    (device,) = processes.run(1, NO_DRIVER, cpu_model)
    assert device.startswith("cpu (")
