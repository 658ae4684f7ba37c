"""Builds shardsnap/_C with CMake and Ninja; everything else about the package is in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs CMake for the one extension and lets it write the library where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        """Configure and build; an error of CMake or the compiler ends the installation."""
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = SOURCE / "build" / f"extension-{sys.implementation.cache_tag}"
        configure = [
            "cmake",
            f"-S{SOURCE}",
            f"-B{build}",
            "-GNinja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
        ]
        build.mkdir(parents=True, exist_ok=True)
        # A cache from another build environment names tools that are gone.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.run([*configure, *os.environ.get("CMAKE_ARGS", "").split()], check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)


setup(ext_modules=[Extension("shardsnap._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
