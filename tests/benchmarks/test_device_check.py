"""The machinery of benchmarks/device_check.sh, with parts that pass, fail, hang and are ended from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device_check import __main__ as device_check
from benchmarks.device_check.build import copy_sources
from benchmarks.device_check.parts import PROGRESS, Clock, Part, run_parts
from benchmarks.device_check.report import JSON_NAME, TABLE_NAME, Outcome, Report, table
from benchmarks.device_check.run_tests import read_diary, successful, summary

REPOSITORY = Path(__file__).resolve().parents[2]


def python(name: str, program: str, folder: Path, seconds: float = 20, needs: list[str] | None = None) -> Part:
    return Part(name, seconds, [sys.executable, "-S", "-c", program], folder, needs or [])


def outcomes_of(parts: list[Part], folder: Path, deadline: float = 60) -> dict[str, Outcome]:
    found: list[Outcome] = []
    run_parts(parts, folder, Clock(deadline), os.environ, found.append)
    assert [outcome.name for outcome in found] == [part.name for part in parts]
    return {outcome.name: outcome for outcome in found}


def test_a_part_that_fails_costs_no_other_but_those_that_need_it(tmp_path: Path) -> None:
    outcomes = outcomes_of(
        [
            python("good", f"print('{PROGRESS}all well')", tmp_path),
            python("bad", "print('because'); raise SystemExit(3)", tmp_path),
            Part("nowhere", 20, ["/nowhere/program"], tmp_path),
            python("dependent", "", tmp_path, needs=["good", "bad"]),
            python("independent", "", tmp_path, needs=["good"]),
        ],
        tmp_path,
    )
    assert [outcome.status for outcome in outcomes.values()] == ["passed", "failed", "failed", "not run", "passed"]
    assert outcomes["good"].message == "all well"
    assert outcomes["bad"].message == "exit status 3: because"
    assert "cannot be started" in outcomes["nowhere"].message
    assert outcomes["dependent"].message == "needs bad, which did not pass"
    assert (tmp_path / "bad.log").read_text() == "because\n"


HANGING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    outcomes = outcomes_of([python("stuck", HANGING, tmp_path, seconds=1), python("next", "", tmp_path)], tmp_path)
    assert [outcome.status for outcome in outcomes.values()] == ["timed out", "passed"]
    child = int((tmp_path / "stuck.log").read_text())
    assert outcomes["stuck"].message == f"over its 1 s; last words: {child}"
    assert not is_alive(child)


def test_what_the_time_is_not_enough_for_is_not_run(tmp_path: Path) -> None:
    outcomes = outcomes_of([python("late", "raise SystemExit(1)", tmp_path)], tmp_path, deadline=1)
    assert outcomes["late"].status == "not run"
    assert "time was over" in outcomes["late"].message


ROW: dict[str, Any] = {
    "path": "shardsnap",
    "verb": "save",
    "gb_per_second": 51.234,
    "of_floor": 0.987,
    "seconds": 0.157,
    "host_blocked_seconds": None,
    "first_seconds": 0.2,
    "rounds": [0.157, 0.157],
    "note": "pinned",
}


def test_the_table_shows_what_there_is(tmp_path: Path) -> None:
    report = Report(machine={"gpu": "none"}, benchmarks={"workload": "a model", "rows": [ROW]})
    assert not report.passed, "nothing has been run"
    report.parts.append(Outcome("build", "passed", 1.0, "built"))
    assert report.passed
    report.parts.append(Outcome("tests", "timed out", 110.0, "over its 110 s"))
    report.write(tmp_path)
    text = (tmp_path / TABLE_NAME).read_text()
    lines = [line.split() for line in text.splitlines()]
    assert ["shardsnap", "save", "51.23", "0.99", "0.1570", "-", "0.2000", "2", "pinned"] in lines
    assert ["tests", "timed", "out", "110.0", "over", "its", "110", "s"] in lines
    assert text.endswith("NOT ALL PARTS PASSED\n")
    content = json.loads((tmp_path / JSON_NAME).read_text())
    assert (content["schema_version"], content["passed"]) == (1, False)
    assert content["parts"][1] == {
        "name": "tests",
        "status": "timed out",
        "seconds": 110.0,
        "message": "over its 110 s",
    }
    assert content["benchmarks"]["rows"] == [ROW]
    report.parts.pop()
    assert table(report).endswith("\nALL PARTS PASSED\n")


def test_a_run_writes_its_files_after_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    looks = f"import json; print(len(json.load(open({str(output / JSON_NAME)!r}))['parts']))"
    parts = [
        python("first", looks, tmp_path),
        python("second", looks, tmp_path),
        python("benchmarks", "raise SystemExit(1)", tmp_path),
    ]
    monkeypatch.setattr(device_check, "WORK", tmp_path / "work")
    monkeypatch.setattr(device_check, "parts_for", lambda *_: parts)
    assert device_check.main([str(output)]) == 1
    assert [part["message"] for part in json.loads((output / JSON_NAME).read_text())["parts"][:2]] == ["0", "1"]
    assert (output / TABLE_NAME).read_text() in capsys.readouterr().out
    parts.pop()
    assert device_check.main([str(output)]) == 0


def test_limits_add_up_to_less_than_the_whole() -> None:
    assert sum(part.seconds for part in device_check.parts_for("cuda", 7.5, 3)) <= device_check.TOTAL_SECONDS <= 360


ENDED = """
import pathlib, sys
from benchmarks.device_check import __main__ as device_check
from benchmarks.device_check.parts import Part
folder = pathlib.Path(sys.argv[1])
device_check.WORK = folder / "work"
hanging = [sys.executable, "-S", "-c", "import os, time; print('>>> I am', os.getpid(), flush=True); time.sleep(600)"]
device_check.parts_for = lambda *_: [Part("hanging", 60, hanging, folder), Part("later", 60, ["true"], folder)]
sys.exit(device_check.main([str(folder / "output")]))
"""


def test_a_run_that_is_ended_from_outside_still_reports(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", ENDED, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    child = 0
    for line in run.stdout:
        if "I am" in line:
            child = int(line.split()[-1])
            run.terminate()
            break
    output, _ = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "NOT ALL PARTS PASSED" in output
    assert [part["status"] for part in json.loads((tmp_path / "output" / JSON_NAME).read_text())["parts"]] == [
        "not run",
        "not run",
    ]
    assert not is_alive(child)


def event(kind: str, test: str = "", outcome: str = "") -> dict[str, Any]:
    return {"event": kind, "test": test, "outcome": outcome, "seconds": 1.0, "message": f"about {test}"}


def test_a_test_that_never_finished_has_crashed() -> None:
    events = [
        {"event": "collected", "runner": "pytest", "tests": ["a", "b", "c", "d", "e"]},
        *(event("started", "a"), event("finished", "a", "passed")),
        *(event("started", "b"), event("finished", "b", "failed")),
        *(event("started", "c"), event("finished", "c", "skipped")),
        event("started", "d"),
    ]
    counts = summary(events, closed=True)
    assert [counts[name] for name in ("passed", "failed", "skipped", "crashed", "not run")] == [1, 1, 1, 1, 1]
    assert [failure["test"] for failure in counts["failures"]] == ["b", "d"]
    assert not successful(counts)
    assert summary(events, closed=False)["crashed"] == 0
    good = summary([{"event": "collected", "runner": "pytest", "tests": ["a"]}, *events[1:3]], closed=True)
    assert successful(good)
    assert not successful(summary([], closed=True)), "no test at all is no success"


TESTS = """
import os
import pytest
pytestmark = [pytest.mark.gpu]

@pytest.mark.parametrize(("one", "two"), [(1, 1), (1, 2)], ids=["same", "other"])
def test_pair(one, two):
    assert one == two

@pytest.mark.skipif(True, reason="not here")
def test_skipped():
    raise AssertionError

def test_raises():
    with pytest.raises(ValueError, match="of that"):
        raise ValueError("an error of that kind")

def test_dies():
    os._exit(9)

def test_last():
    with pytest.raises(KeyError) as caught:
        {}[1]
    assert caught.value.args == (1,)
"""
HIDDEN = """
import importlib.util, runpy, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "pytest":
            raise ModuleNotFoundError(name)
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "pytest" else real(name, package)
sys.argv = ["gpu_tests", "diary.jsonl"]
runpy.run_module("benchmarks.device_check.gpu_tests", run_name="__main__")
"""


@pytest.mark.parametrize("hidden", [False, True], ids=["with pytest", "without"])
def test_tests_run_with_and_without_pytest(tmp_path: Path, hidden: bool) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_torn.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: as in pyproject.toml\n")
    command = ["-c", HIDDEN] if hidden else ["-m", "benchmarks.device_check.gpu_tests", "diary.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_ADDOPTS": "", "CUDA_VISIBLE_DEVICES": ""}
    statuses = [
        subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, check=False)
        for _ in range(2)
    ]
    assert [run.returncode for run in statuses] == [9, 0], statuses[1].stderr
    events = read_diary(tmp_path / "diary.jsonl")
    assert events[-1]["event"] == "ended"
    counts = summary(events, closed=True)
    assert [counts[name] for name in ("passed", "failed", "skipped", "crashed", "not run")] == [3, 2, 1, 1, 0]
    assert ("stand-in" in counts["runner"]) == hidden
    assert {failure["test"].rpartition("::")[2] for failure in counts["failures"]} == {
        "test_dies",
        "test_pair[1]" if hidden else "test_pair[other]",
        "tests/gpu/test_torn.py",
    }


def test_the_copy_holds_sources_alone(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "shardsnap").mkdir(parents=True)
    (copy / "shardsnap" / "_C.so").write_text("of an earlier run")
    copy_sources(REPOSITORY, copy)
    assert (copy / "csrc" / "bindings.cpp").is_file()
    assert (copy / "benchmarks" / "device_check" / "build.py").is_file()
    assert list(copy.rglob("*.so")) == []
