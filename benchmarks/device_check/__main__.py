"""python -m benchmarks.device_check OUTPUT_FOLDER: all parts, then one table and one JSON file.

Needs nothing but the standard library itself: what is missing on the machine fails the part that needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.device_check.parts import Clock, Part, run_parts
from benchmarks.device_check.report import Outcome, Report, table

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = REPOSITORY / "build" / "device-check"
GIB_VARIABLE = "SHARDSNAP_DEVICE_CHECK_GIB"
DEFAULT_GIB = "7.5"
TOTAL_SECONDS = 355.0


class _AbortedError(BaseException):
    """Somebody wants the run to end now; the table comes all the same."""


def parts_for(device: str, gib: float, rounds: int) -> list[Part]:
    """What there is to do. The limits add up to less than TOTAL_SECONDS."""
    copy, results = WORK / "tree", WORK / "results"
    here = [sys.executable, "-m"]
    package = "benchmarks.device_check"
    return [
        Part(
            "environment",
            35,
            [*here, f"{package}.environment", str(results / "environment.json"), "--device", device],
            REPOSITORY,
        ),
        Part("build", 80, [*here, f"{package}.build", str(REPOSITORY), str(copy)], REPOSITORY),
        Part(
            "tests",
            110,
            [*here, f"{package}.run_tests", str(results / "tests.json"), "--seconds", "{seconds}"],
            copy,
            needs=["build"],
        ),
        Part(
            "benchmarks",
            125,
            [
                *[*here, f"{package}.measure", str(results / "benchmarks.json"), "--seconds", "{seconds}"],
                *["--device", device, "--gib", str(gib), "--rounds", str(rounds)],
            ],
            copy,
            needs=["build"],
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 only where every part passed."""
    options = _options(arguments)
    folder = Path(options.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = WORK / "results"
    results.mkdir(parents=True, exist_ok=True)
    for stale in results.iterdir():
        stale.unlink()
    signal.signal(signal.SIGTERM, _abort)
    clock = Clock(options.total_seconds)
    report = Report()
    parts = [part for part in parts_for(options.device, options.gib, options.rounds) if part.name in options.parts]

    def ended(outcome: Outcome) -> None:
        report.parts.append(outcome)
        _collect(report, results)
        report.write(folder)

    report.write(folder)
    try:
        run_parts(parts, folder, clock, _environment(options.device), ended)
    except (_AbortedError, KeyboardInterrupt):
        clock.say("the run was ended from outside")
        for part in parts[len(report.parts) :]:
            ended(Outcome(part.name, "not run", 0.0, "the run was ended from outside"))
    print()
    print(table(report), flush=True)
    clock.say(f"done; everything is in {folder}")
    return 0 if report.passed else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="device_check.sh", description=__doc__)
    parser.add_argument("output", metavar="OUTPUT_FOLDER", help="for the JSON file, the table and the logs")
    parser.add_argument(
        "--gib",
        type=float,
        default=float(os.environ.get(GIB_VARIABLE, DEFAULT_GIB)),
        help=f"of weights to copy in the benchmarks; also ${GIB_VARIABLE}; %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the benchmarks; %(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help='"cpu" tries out the script alone')
    parser.add_argument("--total-seconds", type=float, default=TOTAL_SECONDS, help="for everything; %(default)s")
    names = [part.name for part in parts_for("cuda", 1.0, 1)]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="only these")
    return parser.parse_args(arguments)


def _environment(device: str) -> dict[str, str]:
    # The build tools of an interpreter in a virtual environment lie beside it.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    # What would send a real device's copies elsewhere.
    for name in ("SHARDSNAP_BACKEND", "SHARDSNAP_LIBCUDA", "SHARDSNAP_GPU_TESTS_DEVICE", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    if device == "cpu":
        environment["SHARDSNAP_GPU_TESTS_DEVICE"] = "cpu"
    return environment


def _collect(report: Report, results: Path) -> None:
    """Take over what the parts have written so far."""
    report.machine = _read(results / "environment.json") or report.machine
    report.tests = _read(results / "tests.json") or report.tests
    report.benchmarks = _read(results / "benchmarks.json") or report.benchmarks


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _abort(_: int, __: FrameType | None) -> None:
    raise _AbortedError


if __name__ == "__main__":
    sys.exit(main())
