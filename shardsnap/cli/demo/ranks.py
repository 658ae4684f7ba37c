"""One process per rank, started here, in one process group. If a rank fails, all end and its traceback is raised."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

_COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # a rank that waits longer for another fails, and so ends the run

RankFunction = Callable[..., None]
Send = Callable[[Any], None]


class RankFailedError(Exception):
    """A rank raised, or died. The message says which one, and holds its traceback."""


def run_ranks(world_size: int, device_type: str, function: RankFunction, *arguments: Any) -> Iterator[Any]:
    """Call ``function(device, send, *arguments)`` in ``world_size`` processes and yield what they send, as it comes.

    Args:
        world_size: number of processes.
        device_type: "cpu" (gloo) or "cuda" (nccl, rank r on GPU r).
        function: importable by name.
        arguments: pickled, and so is what is sent.

    Raises:
        RankFailedError: a rank failed; no process is left.
    """
    with tempfile.TemporaryDirectory(prefix="shardsnap-demo-") as directory:
        receiving, sending = mp.get_context("spawn").Pipe(duplex=False)
        settings = (world_size, device_type, str(Path(directory, "store")), sending, function, arguments)
        ranks = start_processes(  # type: ignore[no-untyped-call]
            _serve, settings, world_size, join=False, start_method="spawn"
        )
        try:
            ended = False
            while not ended:
                ended = ranks.join(timeout=0.1)
                while receiving.poll():
                    yield receiving.recv()
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankFailedError(f"rank {error.error_index} failed: {str(error).strip()}") from None
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _serve(
    rank: int,
    world_size: int,
    device_type: str,
    store: str,
    sending: Connection,
    function: RankFunction,
    arguments: tuple[Any, ...],
) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1 announces its end once per module and rank
    warnings.filterwarnings("ignore", message=".*NO_SHARD")  # that it does not shard over one rank is known
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter
    if device_type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at cuBLAS' first use
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if device_type == "cuda" else None,
    )
    function(device, sending.send, *arguments)
    dist.destroy_process_group()
