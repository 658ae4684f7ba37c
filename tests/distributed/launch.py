"""Functions on several ranks: a pool of gloo processes that outlives a test, because starting one costs seconds.

A function goes to the ranks by reference (its module and name), so it must be importable: write it at the top of a test
file. Arguments and return values are pickled; return numpy arrays or CPU tensors, they are copied.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

CASE_TIMEOUT = 120.0  # seconds a case may take on all ranks together
START_TIMEOUT = 180.0  # seconds for interpreters to start, import torch and meet
GRACE = 5.0  # seconds the other ranks get to report, once one rank has failed


class RanksFailedError(AssertionError):
    """A rank raised, died or hung. The message holds every rank's traceback or stack."""


def _serve(rank: int, world_size: int, directory: str, connection: Connection) -> None:
    """The life of one rank: meet the others, then run the functions that come through `connection`, until None."""
    stacks = Path(directory, f"stacks{rank}").open("w")  # noqa: SIM115 - faulthandler keeps it for the whole life
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    connection.send_bytes(pickle.dumps(("ready", None)))
    while True:
        job = connection.recv_bytes()
        search_path, payload = pickle.loads(job)
        if payload is None:
            break
        sys.path[:] = search_path
        torch.manual_seed(0)
        try:
            function, arguments = pickle.loads(payload)
            answer = ("returned", function(*arguments))
            message = pickle.dumps(answer)
        except BaseException:
            message = pickle.dumps(("raised", traceback.format_exc()))
        connection.send_bytes(message)
        gc.collect()  # models of this case hold hooks and cycles; the next case should not pay for them
    dist.destroy_process_group()


class RankPool:
    """`world_size` processes in one gloo group, started at the first `run` and again after a case that failed."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._directory = ""

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = CASE_TIMEOUT) -> list[Any]:
        """Calls ``function(*arguments)`` on every rank and returns what each returned, by rank.

        Raises:
            RanksFailedError: a rank raised, died, or did not return within `timeout` seconds.
        """
        self._start()
        job = pickle.dumps((list(sys.path), pickle.dumps((function, arguments))))
        for connection in self._connections:
            connection.send_bytes(job)
        return self._collect("returned", f"{function.__module__}.{function.__qualname__}", timeout)

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # that rank has died already
                connection.send_bytes(pickle.dumps(([], None)))
        for process in self._processes:
            process.join(10)
        self._kill()

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.mkdtemp(prefix="ranks")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, self._directory, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()  # so that a rank that dies is seen as the end of its pipe
            self._processes.append(process)
            self._connections.append(ours)
        self._collect("ready", "start", START_TIMEOUT)

    def _collect(self, expected: str, what: str, timeout: float) -> list[Any]:
        """Waits for one answer from every rank; any other outcome ends the pool and raises RanksFailedError."""
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while len(answers) < self.world_size:
            waiting = {self._connections[r]: r for r in range(self.world_size) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    answers[rank] = ("died", "the process ended without an answer")
                if answers[rank][0] != expected and not failed:
                    failed = True  # the others may now wait for this rank in a collective
                    deadline = min(deadline, time.monotonic() + GRACE)
        if len(answers) == self.world_size and not failed:
            return [answers[rank][1] for rank in range(self.world_size)]
        report = self._report(answers)
        self._kill()
        raise RanksFailedError(f"{what} on {self.world_size} ranks (limit {timeout:g} s)\n{report}")

    def _report(self, answers: dict[int, tuple[str, Any]]) -> str:
        """What became of each rank: its traceback, or the stacks of a rank that gave no answer."""
        for rank, process in enumerate(self._processes):
            if rank not in answers and process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # until faulthandler has written
        lines = []
        for rank, process in enumerate(self._processes):
            outcome, value = answers.get(rank, ("hung", "no answer"))
            lines.append(
                f"--- rank {rank} {outcome}" + (f" (exit code {process.exitcode})" if outcome == "died" else "")
            )
            stacks = Path(self._directory, f"stacks{rank}")
            if outcome in ("hung", "died") and stacks.exists():
                value = f"{value}\n{stacks.read_text()}"
            lines.append(str(value) if outcome != "returned" else "")
        return "\n".join(lines)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._processes, self._connections = [], []


class Ranks:
    """Pools by world size. Calling it runs a function on that many ranks: ``run_ranks(2, function, *arguments)``."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = CASE_TIMEOUT
    ) -> list[Any]:
        pool = self._pools.setdefault(world_size, RankPool(world_size))
        return pool.run(function, *arguments, timeout=timeout)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = CASE_TIMEOUT
) -> Sequence[Any]:
    """One function on fresh ranks, for scripts; tests use the fixture of the same name, which keeps the processes."""
    pool = RankPool(world_size)
    try:
        return pool.run(function, *arguments, timeout=timeout)
    finally:
        pool.close()
