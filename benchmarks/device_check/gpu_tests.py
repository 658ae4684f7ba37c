"""The process that runs tests/gpu: every test that the diary has no start of, with pytest or without.

It ends itself when the device has failed: every later test would fail with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.device_check.parts import PROGRESS
from benchmarks.device_check.run_tests import read_diary, runner_name

_TESTS = "tests/gpu"


class Diary:
    """What happened, written down at once: the process may die at any test."""

    def __init__(self, path: Path) -> None:
        events = read_diary(path)
        self.known = {event["test"] for event in events if event["event"] == "started"}
        self._collected = [test for event in events if event["event"] == "collected" for test in event["tests"]]
        self._path = path

    def collected(self, tests: list[str]) -> None:
        """These tests are there, whether they are still to be run or not."""
        self._write(event="collected", runner=runner_name(), tests=list(dict.fromkeys([*self._collected, *tests])))

    def started(self, test: str) -> None:
        """A test begins."""
        self._write(event="started", test=test)

    def finished(self, test: str, outcome: str, seconds: float, message: str) -> None:
        """A test is over; where the device is, too, the process ends."""
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        self._write(event="finished", test=test, outcome=outcome, seconds=seconds, message=" ".join(lines)[:400])
        if outcome == "failed":
            print(f"{PROGRESS}FAILED {test}", flush=True)
        if not _device_answers():
            print(f"{PROGRESS}the device fails after {test}; a fresh process goes on", flush=True)
            os._exit(3)

    def ended(self) -> None:
        """The process has nothing more to do."""
        self._write(event="ended")

    def _write(self, **event: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")


class Reporter:
    """A plugin of pytest that keeps the diary."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        self._failed: dict[str, str] = {}
        self._skipped: dict[str, str] = {}
        self._begun = 0.0

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:  # noqa: D102 - a hook of pytest
        self._diary.collected([item.nodeid for item in items])
        left_out = [item for item in items if item.nodeid in self._diary.known]
        items[:] = [item for item in items if item.nodeid not in self._diary.known]
        items.sort(key=lambda item: comes_last(item.nodeid))
        config.hook.pytest_deselected(items=left_out)

    def pytest_collectreport(self, report: Any) -> None:  # noqa: D102 - a hook of pytest
        if report.failed:
            self._diary.started(report.nodeid)
            self._diary.finished(report.nodeid, "failed", 0.0, str(report.longrepr)[-400:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:  # noqa: D102 - a hook of pytest
        self._begun = time.monotonic()
        self._diary.started(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: D102 - a hook of pytest
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._failed.setdefault(report.nodeid, crash.message if crash else str(report.longrepr)[-400:])
        elif report.skipped:
            self._skipped[report.nodeid] = str(report.longrepr[-1] if report.longrepr else "")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:  # noqa: D102 - a hook of pytest
        seconds = time.monotonic() - self._begun
        if nodeid in self._failed:
            self._diary.finished(nodeid, "failed", seconds, self._failed[nodeid])
        elif nodeid in self._skipped:
            self._diary.finished(nodeid, "skipped", seconds, self._skipped[nodeid])
        else:
            self._diary.finished(nodeid, "passed", seconds, "")


def main() -> int:
    """Run what is left to run."""
    diary = Diary(Path(sys.argv[1]))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as tests/gpu/conftest.py does
    if "stand-in" in runner_name():
        from benchmarks.device_check import pytest_stand_in

        status = pytest_stand_in.run(Path(_TESTS), diary)
    else:
        import pytest

        arguments = ["-m", "gpu", _TESTS, "-p", "no:cacheprovider", "-q", "--tb=short", "-rfE"]
        # The other tests' conftest.py may need what is not installed here.
        arguments += ["--continue-on-collection-errors", "--noconftest"]
        status = int(pytest.main(arguments, plugins=[Reporter(diary)]))
        # 5: nothing was left to run. 2 to 4: collection or pytest itself failed, which is no end in order.
        status = 0 if status in (0, 1, 5) else status
    if status == 0:
        diary.ended()
    return status


def comes_last(test: str) -> bool:
    """A capture that fails leaves torch's allocator in the midst of it, which later tests would suffer from."""
    return "graphs" in test


def _device_answers() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
