"""Which copy device serves a torch.device, and which stream its caller is on."""

import os

import torch

from shardsnap import _C
from shardsnap.errors import DeviceUnavailableError, UnsafeStateError

# The driver library to load in place of libcuda.so.1.
LIBRARY_VARIABLE = "SHARDSNAP_LIBCUDA"
# "cuda" sends tensors on the CPU through the CUDA backend, for a driver whose device memory is host memory.
BACKEND_VARIABLE = "SHARDSNAP_BACKEND"
# Worker threads of the CPU backend.
THREADS_VARIABLE = "SHARDSNAP_COPY_THREADS"

_CPU_CHUNK_BYTES = 1 << 20  # what a worker claims at a time: none waits long for the last one
_CUDA_CHUNK_BYTES = 32 << 20  # about 0.6 ms at 55 GB/s: the launch of the next one is hidden behind it


def open_copy_device(device: torch.device) -> _C.CopyDevice:
    """A copy device, with streams of its own, for tensors on ``device``.

    Raises:
        DeviceUnavailableError: no backend for this kind of device, or its driver is missing or does not start.
        ValueError: an environment variable holds something else than what it is for.
    """
    if _uses_cuda(device):
        return _C.make_cuda_device(device.index or 0, os.environ.get(LIBRARY_VARIABLE, ""))
    if device.type == "cpu":
        return _C.make_cpu_device(_copy_threads())
    raise DeviceUnavailableError(f"no copy backend for tensors on {device}: shardsnap copies from CPU and CUDA devices")


def chunk_bytes(device: torch.device) -> int:
    """Bytes of the longest single copy for tensors on ``device``."""
    return _CUDA_CHUNK_BYTES if _uses_cuda(device) else _CPU_CHUNK_BYTES


def host_is_stream(device: torch.device) -> bool:
    """True where work on ``device`` is done when the call that asks for it returns."""
    return device.type == "cpu"


def caller_stream(device: torch.device) -> int:
    """The CUstream handle of the caller's current stream on ``device``; 0 where the host is the stream.

    Raises:
        UnsafeStateError: the stream is capturing a CUDA graph, into which the copies would be recorded.
    """
    if host_is_stream(device):
        return 0
    if torch.cuda.is_current_stream_capturing():
        raise UnsafeStateError("the current stream is capturing a CUDA graph; save and restore outside the capture")
    return int(torch.cuda.current_stream(device).cuda_stream)


def _uses_cuda(device: torch.device) -> bool:
    if device.type == "cuda":
        return True
    backend = os.environ.get(BACKEND_VARIABLE, "")
    if backend not in ("", "cpu", "cuda"):
        raise ValueError(f'{BACKEND_VARIABLE} must be "cpu" or "cuda", got {backend!r}')
    return device.type == "cpu" and backend == "cuda"


def _copy_threads() -> int:
    threads = os.environ.get(THREADS_VARIABLE) or "0"
    if not threads.isdecimal():
        raise ValueError(f"{THREADS_VARIABLE} must be a number of threads, got {threads!r}")
    return int(threads)
