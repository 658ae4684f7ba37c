"""What a run has found: one JSON file, rewritten after every part, and one table in plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1
JSON_NAME = "device_check.json"
TABLE_NAME = "device_check.txt"

Status = Literal["passed", "failed", "timed out", "not run"]


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        name: of the part.
        status: "not run" is no success either.
        seconds: that it took.
        message: one line that says why.
    """

    name: str
    status: Status
    seconds: float
    message: str


@dataclass
class Report:
    """Everything, as far as it is known yet.

    Attributes:
        machine: facts by name.
        parts: in the order of the run.
        tests: counts, and what failed.
        benchmarks: the size that was measured, and one row per path and verb.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    parts: list[Outcome] = field(default_factory=list)
    tests: dict[str, Any] = field(default_factory=dict)
    benchmarks: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every part did."""
        return bool(self.parts) and all(part.status == "passed" for part in self.parts)

    def write(self, folder: Path) -> None:
        """Replace the files of the report."""
        content = {"schema_version": SCHEMA_VERSION, "passed": self.passed, **asdict(self)}
        write_whole(folder / JSON_NAME, json.dumps(content, indent=1) + "\n")
        write_whole(folder / TABLE_NAME, table(self))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or an abort, finds the old one or the new one."""
    unfinished = path.with_suffix(path.suffix + ".tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


def table(report: Report) -> str:
    """The report as text."""
    sections = [
        _section("The machine", ("what", "value"), [(name, str(value)) for name, value in report.machine.items()]),
        _section("Tests", ("what", "value"), _test_rows(report.tests)),
        _section(_benchmark_title(report.benchmarks), _BENCHMARK_HEADINGS, _benchmark_rows(report.benchmarks)),
        _section(
            "Parts",
            ("part", "status", "seconds", "why"),
            [(part.name, part.status, f"{part.seconds:.1f}", part.message) for part in report.parts],
        ),
    ]
    verdict = "ALL PARTS PASSED" if report.passed else "NOT ALL PARTS PASSED"
    return "\n".join([*(section for section in sections if section), verdict, ""])


def _section(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(headings), *map(tuple, rows)]
    if len(lines) == 1:
        return ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings) - 1)]
    texts = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    ]
    return "\n".join([title, "-" * len(title), *(text.rstrip() for text in texts), ""])


def _test_rows(tests: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not tests:
        return []
    rows = [(name, str(tests[name])) for name in ("runner", "passed", "failed", "skipped", "crashed", "not run")]
    rows += [("FAILED", f"{failure['test']}: {failure['message'][:200]}") for failure in tests["failures"]]
    return rows


_BENCHMARK_HEADINGS = ("path", "verb", "GB/s", "of floor", "seconds", "host blocked", "first use", "rounds", "note")


def _benchmark_title(benchmarks: Mapping[str, Any]) -> str:
    return f"Copies: {benchmarks.get('workload', 'nothing measured')}"


def _benchmark_rows(benchmarks: Mapping[str, Any]) -> list[Sequence[str]]:
    return [
        (
            row["path"],
            row["verb"],
            _number(row["gb_per_second"], ".2f"),
            _number(row["of_floor"], ".2f"),
            _number(row["seconds"], ".4f"),
            _number(row["host_blocked_seconds"], ".4f"),
            _number(row["first_seconds"], ".4f"),
            str(len(row["rounds"])),
            row["note"],
        )
        for row in benchmarks.get("rows", [])
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
