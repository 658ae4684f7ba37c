"""What the benchmarks share, and the tables at the end of a run."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _pytest.terminal import TerminalReporter

from benchmarks.board import Board
from benchmarks.floor import Floor
from benchmarks.memory import huge_pages_setting, peak_resident_bytes
from benchmarks.settings import Settings, read_settings
from benchmarks.tables import render
from shardsnap.sizes import format_size

_BOARD = pytest.StashKey[Board]()
_SECONDS_A_BENCHMARK = 1800


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BOARD] = Board()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_SECONDS_A_BENCHMARK))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    board = config.stash[_BOARD]
    if board.races:
        board.facts.append(("most memory of the process at any time", format_size(peak_resident_bytes())))
        terminalreporter.section("copy paths")
        terminalreporter.write(render(board, read_settings(), colour=bool(terminalreporter.isatty)))


@pytest.fixture(scope="session")
def settings() -> Settings:
    return read_settings()


@pytest.fixture(scope="session")
def board(request: pytest.FixtureRequest, floor: Floor, settings: Settings) -> Board:
    found = request.config.stash[_BOARD]
    found.facts.extend(
        (
            ("processor", _processor()),
            ("copy threads, and their stores", f"{settings.threads}, {floor.isa}"),
            ("transparent huge pages", huge_pages_setting()),
            ("torch", torch.__version__),
        )
    )
    return found


@pytest.fixture(scope="session")
def floor(settings: Settings) -> Iterator[Floor]:
    with Floor(settings.threads) as opened:
        yield opened


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
