"""Runs tests/gpu in a process of its own, and again without the test at fault where that process dies or hangs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.device_check.parts import PROGRESS
from benchmarks.device_check.report import write_whole

_PROCESS = "benchmarks.device_check.gpu_tests"
_MOST_STARTS = 4
_SECONDS_A_TEST = 60.0  # without any news after which a process counts as hanging
_SECONDS_TO_COLLECT = 60.0


def main() -> int:
    """Write counts as JSON; 0 where tests passed and none failed, crashed or was left out for want of time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    end = time.monotonic() + 0.95 * options.seconds - 2
    diary = options.results.with_suffix(".jsonl")
    for _ in range(_MOST_STARTS):
        finished = _run_process(diary, options.results, end)
        if finished or time.monotonic() > end:
            break
    counts = summary(read_diary(diary), closed=True)
    _save(options.results, counts)
    for failure in counts["failures"]:
        print(f"{PROGRESS}FAILED {failure['test']}: {failure['message']}")
    numbers = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped", "crashed", "not run"))
    print(f"{PROGRESS}{numbers} ({counts['runner']})")
    return 0 if successful(counts) else 1


def successful(counts: dict[str, Any]) -> bool:
    """Whether the counts are those of a run in which all went well."""
    return counts["passed"] > 0 and not (counts["failed"] or counts["crashed"] or counts["not run"])


def _run_process(diary: Path, results: Path, end: float) -> bool:
    """Start the tests that have not been started yet; whether another process would find nothing more to do."""
    before = len(_started(diary))
    process = subprocess.Popen([sys.executable, "-m", _PROCESS, str(diary)], stdin=subprocess.DEVNULL)
    news, seen = time.monotonic(), 0
    collected = False
    try:
        while process.poll() is None:
            time.sleep(0.2)
            events = read_diary(diary)
            if len(events) > seen:
                news, seen = time.monotonic(), len(events)
                collected = collected or any(event["event"] == "collected" for event in events)
                _save(results, summary(events, closed=False))
            patience = _SECONDS_A_TEST if collected else _SECONDS_TO_COLLECT
            if time.monotonic() > end:
                print(f"{PROGRESS}the time for tests is over", flush=True)
                return False
            if time.monotonic() - news > patience:
                print(f"{PROGRESS}no news for {patience:.0f} s", flush=True)
                return False
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    last = (read_diary(diary) or [{"event": ""}])[-1]["event"]
    if last != "ended":
        print(f"{PROGRESS}the process of the tests died with status {process.returncode}", flush=True)
    return last == "ended" or len(_started(diary)) == before


def _started(diary: Path) -> list[str]:
    return [event["test"] for event in read_diary(diary) if event["event"] == "started"]


def read_diary(path: Path) -> list[dict[str, Any]]:
    """The events so far, one JSON object a line: collected, started, finished, ended."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:  # the process died while it wrote
            continue
    return events


def summary(events: list[dict[str, Any]], *, closed: bool) -> dict[str, Any]:
    """Counts; once `closed`, a test that has started and not finished has crashed."""
    runner, tests, started = "none", [], []
    results: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "collected":
            runner, tests = event["runner"], event["tests"]
        elif event["event"] == "started":
            started.append(event["test"])
        elif event["event"] == "finished":
            results[event["test"]] = event
    crashed = [test for test in dict.fromkeys(started) if test not in results] if closed else []
    by_outcome = {
        name: [test for test, event in results.items() if event["outcome"] == name]
        for name in ("passed", "failed", "skipped")
    }
    failures = [{"test": test, "message": results[test]["message"]} for test in by_outcome["failed"]]
    failures += [{"test": test, "message": "the process died or hung in this test"} for test in crashed]
    return {
        "runner": runner,
        **{name: len(found) for name, found in by_outcome.items()},
        "crashed": len(crashed),
        "not run": len([test for test in tests if test not in results and test not in crashed]),
        "failures": failures,
        "skips": [{"test": test, "message": results[test]["message"]} for test in by_outcome["skipped"]],
        "seconds": {test: round(event["seconds"], 3) for test, event in results.items()},
    }


def runner_name() -> str:
    """What runs the tests: pytest where it is installed, else the stand-in of this package."""
    return "pytest" if importlib.util.find_spec("pytest") else "stand-in for pytest, which is not installed"


def _save(results: Path, counts: dict[str, Any]) -> None:
    write_whole(results, json.dumps(counts, indent=1))


if __name__ == "__main__":
    sys.exit(main())
