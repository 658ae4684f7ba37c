"""The parts of a run: each a process of its own with a time limit, so that one that fails or hangs costs no other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.device_check.report import Outcome

PROGRESS = ">>> "
"""A part's lines that start so are shown while it runs; all of them are in its log."""

LEAST_SECONDS = 3.0  # with less left, a part is not even started
_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 15.0
_TERMINATION_SECONDS = 3.0


@dataclass(frozen=True)
class Part:
    """One step of a run.

    Attributes:
        name: as in the table; its log is named after it.
        seconds: that it may take.
        command: what to run; "{seconds}" in it becomes the time that it really has.
        directory: to run it in.
        needs: parts without whose success it makes no sense.
    """

    name: str
    seconds: float
    command: Sequence[str]
    directory: Path
    needs: Sequence[str] = ()


class Clock:
    """Seconds since the start of the run, and until its deadline."""

    def __init__(self, deadline: float) -> None:
        self._start = time.monotonic()
        self._deadline = deadline

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - self.elapsed()

    def say(self, text: str) -> None:
        """Print a line with the time in front."""
        print(f"[{self.elapsed():6.1f} s] {text}", flush=True)


def run_parts(
    parts: Sequence[Part], logs: Path, clock: Clock, environment: Mapping[str, str], ended: Callable[[Outcome], None]
) -> None:
    """Run the parts in order; ``ended`` is told after each one, whether it was run or not."""
    outcomes: dict[str, Outcome] = {}
    for part in parts:
        missing = [name for name in part.needs if name in outcomes and outcomes[name].status != "passed"]
        if missing:
            outcome = Outcome(part.name, "not run", 0.0, f"needs {', '.join(missing)}, which did not pass")
        elif clock.left() < LEAST_SECONDS:
            outcome = Outcome(part.name, "not run", 0.0, f"the run's time was over after {clock.elapsed():.0f} s")
        else:
            outcome = _run(part, logs / f"{part.name}.log", clock, environment)
        clock.say(f"{part.name}: {outcome.status} after {outcome.seconds:.1f} s: {outcome.message}")
        outcomes[part.name] = outcome
        ended(outcome)


def _run(part: Part, log: Path, clock: Clock, environment: Mapping[str, str]) -> Outcome:
    limit = min(part.seconds, clock.left())
    clock.say(f"{part.name}: started, with {limit:.0f} s")
    started = time.monotonic()
    command = [word.replace("{seconds}", f"{limit:.1f}") for word in part.command]
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=part.directory,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        return Outcome(part.name, "failed", 0.0, f"cannot be started: {error}")
    try:
        in_time = _follow(process, log, part.name, clock, started + limit)
    finally:
        _end(process)
    seconds = time.monotonic() - started
    if not in_time:
        return Outcome(part.name, "timed out", seconds, f"over its {limit:.0f} s; last words: {_last_line(log)}")
    if process.returncode != 0:
        return Outcome(part.name, "failed", seconds, f"exit status {process.returncode}: {_last_line(log)}")
    return Outcome(part.name, "passed", seconds, _last_line(log))


def _follow(process: subprocess.Popen[bytes], log: Path, name: str, clock: Clock, end: float) -> bool:
    """Show the progress of a process until it ends, which it has to before ``end``; whether it did."""
    shown, quiet_since = 0, time.monotonic()
    while True:
        ended = process.poll() is not None
        # The last line may be half written.
        lines = log.read_bytes().decode(errors="replace").split("\n")[:-1]
        for line in lines[shown:]:
            if line.startswith(PROGRESS):
                clock.say(f"{name}: {line.removeprefix(PROGRESS)}")
                quiet_since = time.monotonic()
        shown = len(lines)
        if ended:
            return True
        if time.monotonic() >= end:
            return False
        if time.monotonic() - quiet_since > _HEARTBEAT_SECONDS:
            clock.say(f"{name}: still running")
            quiet_since = time.monotonic()
        time.sleep(_POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the part's session, the process and all that it started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATION_SECONDS)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_bytes().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix(PROGRESS)[:300] if lines else "it said nothing"
