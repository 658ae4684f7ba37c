"""The floor's C++, compiled at first use and whenever it has changed."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("floor.cpp")
_BUILD = Path(__file__).resolve().parents[2] / "build" / "bench"
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra")


class Piece(ctypes.Structure):
    """One copy, as floor.cpp declares it."""

    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the floor's library, with the types of its functions.

    Raises:
        subprocess.CalledProcessError: the compiler ($CXX, or g++) refuses.
    """
    library = ctypes.CDLL(str(_compiled()))
    address, size, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool
    for name, result, arguments in (
        ("floor_isa", ctypes.c_char_p, []),
        ("floor_open", address, [ctypes.c_uint]),
        ("floor_close", None, [address]),
        ("floor_copy", None, [address, ctypes.POINTER(Piece), size, flag]),
        ("floor_repeat", None, [address, address, address, size, size, flag]),
        ("floor_map", address, [size, flag]),
        ("floor_unmap", None, [address, size]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compiled() -> Path:
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    command = [*compiler, *_FLAGS, str(_SOURCE)]
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    library = _BUILD / f"floor-{digest}.so"
    if not library.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.replace(library)
    return library
