"""Builds the extension with what is installed, in a copy of the sources, so that the tree stays as it is."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.device_check.parts import PROGRESS

_FOLDERS = ("benchmarks", "csrc", "shardsnap", "tests")
_FILES = ("CMakeLists.txt", "pyproject.toml", "setup.py", "README.md", "LICENSE")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
_CHECK = "import shardsnap._C as c, shardsnap; print('>>> built', c.__file__, 'copies with', c.streaming_copy_isa())"


def main() -> int:
    """Copy and build; 0 where the extension can be imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("copy", type=Path)
    options = parser.parse_args()
    copy_sources(options.repository, options.copy)
    for name, way in (("cmake", _with_cmake), ("the compiler alone", _with_compiler)):
        print(f"{PROGRESS}building with {name}", flush=True)
        try:
            way(options.copy)
            _run([sys.executable, "-c", _CHECK], options.copy)
        except (OSError, LookupError, subprocess.SubprocessError) as error:
            print(f"{PROGRESS}{name}: {error}", flush=True)
        else:
            return 0
    print(f"{PROGRESS}the extension cannot be built here; see the log of this part")
    return 1


def copy_sources(repository: Path, copy: Path) -> None:
    """Make ``copy`` hold what is built, tested and measured, and nothing that was built before."""
    if copy.exists():
        shutil.rmtree(copy)
    copy.mkdir(parents=True)
    for name in _FOLDERS:
        shutil.copytree(repository / name, copy / name, ignore=_IGNORED, ignore_dangling_symlinks=True)
    for name in _FILES:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(repository / name, copy / name)


def _with_cmake(copy: Path) -> None:
    """As setup.py does, with whatever generator there is and no setuptools."""
    build = copy / "build"
    generator = ["-GNinja"] if shutil.which("ninja") else []
    _run(
        [
            *["cmake", f"-S{copy}", f"-B{build}", *generator, "-DCMAKE_BUILD_TYPE=Release"],
            *[f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={copy / 'shardsnap'}"],
        ],
        copy,
    )
    _run(["cmake", "--build", str(build), "--parallel", str(len(os.sched_getaffinity(0)))], copy)


def _with_compiler(copy: Path) -> None:
    """In one go; torch carries pybind11's headers where nothing else does."""
    compiler = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    if compiler is None:
        raise LookupError("there is no C++ compiler")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    emulator = copy / "csrc" / "emulator"
    sources = sorted(str(path) for path in (copy / "csrc").rglob("*.cpp") if emulator not in path.parents)
    _run(
        [
            *[compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"],
            *[f"-I{copy / 'csrc'}", f"-I{sysconfig.get_paths()['include']}", f"-I{_pybind11_headers()}"],
            *[*sources, "-o", str(copy / "shardsnap" / f"_C{suffix}"), "-ldl"],
        ],
        copy,
    )


def _pybind11_headers() -> Path:
    places: list[Callable[[], Path]] = [
        lambda: _package("pybind11") / "include",
        lambda: _package("torch") / "include",
    ]
    for place in places:
        with contextlib.suppress(LookupError):
            if (place() / "pybind11" / "pybind11.h").exists():
                return place()
    raise LookupError("there are no headers of pybind11")


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise LookupError(f"{name} is not installed")
    return Path(found.origin).parent


def _run(command: Sequence[str], directory: Path) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, cwd=directory, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
