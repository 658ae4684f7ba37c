"""The copies of benchmarks/device_check.sh on the CPU: every path is measured, and one that is wrong is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device_check import copy_paths, measure, workload
from benchmarks.device_check.copy_paths import DcpStager, Shardsnap, SlimeStyle, VerlStyle

CPU = torch.device("cpu")
FLOOR = "floor: large pinned copies"
NAMES = {path.name for path in (Shardsnap, SlimeStyle, DcpStager, VerlStyle)}


def measured(folder: Path, seconds: float = 600) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """The exit status, and the rows by path and verb."""
    results = folder / "results.json"
    arguments = ["--device", "cpu", "--gib", "0.002", "--rounds", "2", "--seconds", str(seconds)]
    status = measure.main([str(results), *arguments])
    return status, {(row["path"], row["verb"]): row for row in json.loads(results.read_text())["rows"]}


def test_every_path_is_measured(tmp_path: Path) -> None:
    status, rows = measured(tmp_path)
    assert status == 0
    assert {path for path, _ in rows} == NAMES | {FLOOR}
    assert {verb for path, verb in rows if path == Shardsnap.name} == {"save", "restore"}
    for (path, verb), row in rows.items():
        assert not row["failed"]
        assert len(row["rounds"]) == 2
        assert row["host_blocked_seconds"] <= row["seconds"] * 1.001
        assert row["first_seconds"] > 0
        assert row["gb_per_second"] == pytest.approx(row["nbytes"] / row["seconds"] / 1e9)
        assert (row["of_floor"] is None) == (path == FLOOR), (path, verb)
    assert rows[FLOOR, "both at once"]["nbytes"] == 2 * rows[FLOOR, "save"]["nbytes"]


def fails(_: Any) -> Any:
    raise RuntimeError("no such copy\nand more")


def does_nothing(_: Any) -> Any:
    return lambda: None


class Once:
    """Works the first time only: what only the stamps of the rounds can see."""

    def __init__(self, verb: Callable[[Any], Any]) -> None:
        self.verb, self.calls = verb, 0

    def __get__(self, path: Any, _: Any) -> Callable[[], Any]:
        def call() -> Any:
            self.calls += 1
            return self.verb(path) if self.calls == 1 else does_nothing(path)

        return call


@pytest.mark.parametrize(
    ("kind", "verb", "how", "rounds"),
    [
        (VerlStyle, "save", fails, 0),
        (VerlStyle, "restore", does_nothing, 0),
        (SlimeStyle, "restore", Once(SlimeStyle.restore), 2),
        (SlimeStyle, "save", Once(SlimeStyle.save), 2),
        (DcpStager, "save", Once(DcpStager.save), 2),
        (Shardsnap, "open", fails, 0),
    ],
)
def test_a_path_that_fails_is_named_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, verb: str, how: Any, rounds: int
) -> None:
    monkeypatch.setattr(kind, verb, how)
    status, rows = measured(tmp_path)
    assert status == 1
    mine = [row for (path, _), row in rows.items() if path == kind.name]
    assert mine
    assert all(row["failed"] for row in mine)
    assert all(row["note"].startswith("FAILED: ") for row in mine)
    assert max(len(row["rounds"]) for row in mine) == rounds
    others = [row for (path, _), row in rows.items() if path != kind.name]
    assert len({row["path"] for row in others}) == len(NAMES)
    assert not any(row["failed"] for row in others)
    assert all(len(row["rounds"]) == 2 for row in others)


def test_no_time_is_no_success(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--gib", "0.002", "--rounds", "2", "--seconds", "0"]
    assert measure.main([str(results), *arguments]) == 1


def test_the_size_follows_what_is_asked_for_and_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "available_bytes", lambda: 1 << 40)
    whole = workload.choose_size(7.5, CPU)
    assert whole.nbytes == pytest.approx(8.04e9, rel=0.01)
    assert "all of it" in whole.text
    small = workload.choose_size(0.1, CPU)
    assert 0.08 * 2**30 < small.nbytes < 0.11 * 2**30
    assert len(small.sizes) == len(whole.sizes)
    assert "scaled down" not in small.text
    monkeypatch.setattr(workload, "available_bytes", lambda: 16 << 30)
    short = workload.choose_size(7.5, CPU)
    assert short.nbytes < 1.1 * 2**30
    assert "scaled down" in short.text


def test_the_floor_moves_every_byte() -> None:
    floor = copy_paths.Floor((5 << 20) + 1, CPU)
    floor.to_host()()
    assert int(floor._host[0].sum()) == floor.nbytes
    floor.to_device()()
    assert int(floor._far[1].sum()) == floor._far[1].numel() - floor.nbytes
