"""The board as text."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.board import Board, Crossing, LapTable, Target
from benchmarks.settings import Settings
from shardsnap.sizes import format_size

_WIDTH = 120


def render(board: Board, settings: Settings, *, colour: bool) -> str:
    """The tables, one below the other."""
    console = Console(file=io.StringIO(), width=_WIDTH, force_terminal=colour, no_color=not colour)
    for table in _tables(board, settings):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _tables(board: Board, settings: Settings) -> Iterator[Table]:
    for race in board.races:
        yield _race_table(race)
    if board.crossings:
        yield _crossing_table(board.crossings)
    if board.facts:
        yield _machine_table(board)
    if board.targets:
        yield _target_table(board.targets, settings)


def _race_table(race: LapTable) -> Table:
    size = f", {format_size(race.nbytes)}" if race.nbytes else ""
    table = Table(title=f"{race.title}{size}", title_justify="left", title_style="bold")
    table.add_column("path", ratio=1)
    for heading in ("median", "GB/s", "time over the first's"):
        table.add_column(heading, justify="right")
    for lap in race.laps:
        rate = f"{race.nbytes / lap.seconds / 1e9:.2f}" if race.nbytes else ""
        table.add_row(lap.name, _seconds(lap.seconds), rate, f"{lap.ratio:.2f}")
    return table


def _crossing_table(crossings: list[Crossing]) -> Table:
    table = Table(
        title="Non-temporal stores against memcpy, one copy again and again",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("size of the copy", justify="right")
    for crossing in crossings:
        table.add_column(f"{_threads(crossing)}: memcpy GB/s", justify="right")
        table.add_column("non-temporal GB/s", justify="right")
    for rows in zip(*(crossing.rows for crossing in crossings), strict=True):
        rates = (f"{rate:.2f}" for _, *pair in rows for rate in pair)
        table.add_row(format_size(rows[0][0]), *rates)
    table.caption = "; ".join(
        f"{_threads(crossing)}: never slower from {format_size(crossing.nbytes)} on"
        if crossing.nbytes is not None
        else f"{_threads(crossing)}: no crossing"
        for crossing in crossings
    )
    return table


def _machine_table(board: Board) -> Table:
    table = Table(title="The machine", title_justify="left", title_style="bold")
    table.add_column("what", ratio=1)
    table.add_column("value", justify="right")
    for name, value in board.facts:
        table.add_row(name, value)
    return table


def _target_table(targets: list[Target], settings: Settings) -> Table:
    table = Table(title="Targets", title_justify="left", title_style="bold")
    table.add_column("what", ratio=1)
    for heading in ("target", "measured", "verdict"):
        table.add_column(heading, justify="right")
    for target in targets:
        verdict = ("[green]PASS" if target.met else "[red]FAIL") if settings.judged else "not judged"
        table.add_row(
            target.name,
            f"{target.sense} {target.bound:g}{target.unit}",
            f"{target.value:.3f}{target.unit}",
            verdict,
        )
    if not settings.judged:
        table.caption = "A small run checks the bytes; its times say nothing."
    return table


def _threads(crossing: Crossing) -> str:
    return f"{crossing.threads} thread{'s' if crossing.threads != 1 else ''}"


def _seconds(seconds: float) -> str:
    """With a unit that leaves digits in front of the point."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"
