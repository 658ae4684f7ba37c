"""As much of pytest as tests/gpu uses, for machines that have none: marks, raises, skip, and a loop over the tests."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.device_check.gpu_tests import Diary


class Skipped(Exception):  # noqa: N818 - pytest's own name
    """A test that does not apply here."""


class _Mark:
    """Both the mark and the decorator that puts it on a function."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None) -> None:
        self.name, self.arguments, self.options = name, arguments, options or {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], types.FunctionType) and not options:
            function = arguments[0]
            function.pytestmark = [*getattr(function, "pytestmark", []), self]  # type: ignore[attr-defined]
            return function
        return _Mark(self.name, arguments, options)


class _Marks:
    def __getattr__(self, name: str) -> _Mark:
        return _Mark(name)


mark = _Marks()


class _Caught:
    value: BaseException


@contextlib.contextmanager
def raises(kind: Any, match: str | None = None) -> Iterator[_Caught]:
    """The block must raise ``kind``."""
    caught = _Caught()
    try:
        yield caught
    except kind as error:
        caught.value = error
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{match!r} is not in {error}") from error
    else:
        raise AssertionError(f"{kind} was not raised")


def skip(reason: str = "") -> None:
    """End the test as one that does not apply."""
    raise Skipped(reason)


def fail(reason: str = "", pytrace: bool = True) -> None:  # noqa: ARG001 - pytest's signature
    """End the test as failed."""
    raise AssertionError(reason)


def fixture(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Nothing in tests/gpu uses one; modules that it imports from define some."""
    return function if function is not None else lambda inner: inner


def run(folder: Path, diary: Diary) -> int:
    """Run every test of a folder that the diary does not know."""
    with _importable():
        return _run(folder, diary)


def _run(folder: Path, diary: Diary) -> int:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(".".join([*folder.parts, "conftest"]))
    files = sorted(folder.glob("test_*.py"), key=lambda path: ("graphs" in path.name, path.name))  # as gpu_tests has it
    cases = [case for path in files for case in _cases_of(path)]
    diary.collected([name for name, _, _ in cases])
    for name, call, reason in cases:
        if name not in diary.known:
            diary.started(name)
            started = time.monotonic()
            outcome, message = _outcome(call, reason)
            diary.finished(name, outcome, time.monotonic() - started, message)
    return 0


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Let ``import pytest`` find this module, in processes that tests start as well."""
    with tempfile.TemporaryDirectory(prefix="stand-in") as folder:
        Path(folder, "pytest.py").write_text(
            f"from {__name__} import Skipped, fail, fixture, mark, raises, skip  # noqa: F401\n"
        )
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
        yield


def _cases_of(path: Path) -> Iterator[tuple[str, Callable[[], None], str]]:
    """Name, call and the reason to leave it out, of every test in a file; a file that fails is one failing test."""
    try:
        module = importlib.import_module(".".join(path.with_suffix("").parts))
    except Exception:
        text = traceback.format_exc()
        yield str(path), lambda: fail(text), ""
        return
    shared = getattr(module, "pytestmark", [])
    for name, function in vars(module).items():
        if name.startswith("test_") and isinstance(function, types.FunctionType):
            marks = [*shared, *getattr(function, "pytestmark", [])]
            reasons = [
                mark.options.get("reason", "") for mark in marks if mark.name == "skipif" and any(mark.arguments)
            ]
            for label, arguments in _parameters(marks):
                yield f"{path}::{name}{label}", _bound(function, arguments), reasons[0] if reasons else ""


def _bound(function: Callable[..., None], arguments: dict[str, Any]) -> Callable[[], None]:
    return lambda: function(**arguments)


def _parameters(marks: Sequence[_Mark]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases of all parametrize marks together; without one, a single case without arguments."""
    choices = []
    for mark in marks:
        if mark.name == "parametrize":
            names, values = mark.arguments
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            rows = [(value,) if len(names) == 1 else tuple(value) for value in values]
            choices.append([(index, dict(zip(names, row, strict=True))) for index, row in enumerate(rows)])
    for combination in itertools.product(*choices):
        merged: dict[str, Any] = {}
        for _, arguments in combination:
            merged |= arguments
        indices = "-".join(str(index) for index, _ in combination)
        yield f"[{indices}]" if indices else "", merged


def _outcome(call: Callable[[], None], reason: str) -> tuple[str, str]:
    if reason:
        return "skipped", reason
    try:
        call()
    except Skipped as skipped:
        return "skipped", str(skipped)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""
