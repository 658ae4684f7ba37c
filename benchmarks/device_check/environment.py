"""What machine this is: the facts that the figures depend on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.device_check.host_memory import available_bytes, total_bytes
from benchmarks.device_check.parts import PROGRESS
from benchmarks.device_check.report import write_whole

_QUERY = (
    *("name", "driver_version", "memory.total", "memory.free", "pcie.link.gen.current", "pcie.link.gen.max"),
    *("pcie.link.width.current", "pcie.link.width.max", "pci.bus_id", "compute_mode", "persistence_mode"),
)
_TIMEOUT = 15


def main() -> int:
    """Write the facts as JSON; 0 where the device that was asked for is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    options = parser.parse_args()
    facts: dict[str, Any] = {}
    for group in (_host_facts, _source_facts, _gpu_facts):
        facts.update(group())
        write_whole(options.results, json.dumps(facts, indent=1))
    usable, torch_facts = _torch_facts(options.device)
    facts.update(torch_facts)
    write_whole(options.results, json.dumps(facts, indent=1))
    for name, value in facts.items():
        print(f"{name}: {value}")
    message = f"{facts.get('torch device', options.device)}, torch {facts['torch']}, python {facts['python']}"
    print(f"{PROGRESS}{message}" if usable else f"{PROGRESS}no usable {options.device} device: {message}")
    return 0 if usable else 1


def _host_facts() -> dict[str, Any]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "kernel": platform.platform(),
        "processor": _first_line_value(Path("/proc/cpuinfo"), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "numa nodes": _text(Path("/sys/devices/system/node/online")),
        "host memory, GB": round(total_bytes() / 1e9, 1),
        "host memory available, GB": round(available_bytes() / 1e9, 1),
        "transparent huge pages": _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "locked memory limit": "unlimited" if locked == resource.RLIM_INFINITY else str(locked),
        **{name: shutil.which(name) or "missing" for name in ("cmake", "ninja", "c++")},
    }


def _source_facts() -> dict[str, Any]:
    revision = _output(["git", "rev-parse", "HEAD"])
    changed = _output(["git", "status", "--porcelain"])
    return {"git revision": revision or "unknown", "git changes": len(changed.splitlines()) if revision else "unknown"}


def _gpu_facts() -> dict[str, Any]:
    values = _output(["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"])
    if not values:
        return {"nvidia-smi": "no answer"}
    # One GPU is used, the first.
    first = values.splitlines()[0].split(",")
    return {f"gpu {name}": value.strip() for name, value in zip(_QUERY, first, strict=False)}


def _torch_facts(device: str) -> tuple[bool, dict[str, Any]]:
    """Whether torch can use the device, and what it says."""
    try:
        import torch
    except Exception as error:
        return False, {"torch": f"cannot be imported: {error}"}
    facts: dict[str, Any] = {"torch": torch.__version__, "torch cuda": torch.version.cuda or "none"}
    for name in ("pytest", "numpy", "pybind11"):
        facts[name] = _version_of(name)
    if device == "cpu":
        return True, {**facts, "torch device": "cpu, which tries out the script alone"}
    try:
        free, total = torch.cuda.mem_get_info(0)
        torch.ones(1, device="cuda:0").add_(1).item()
        facts["torch device"] = torch.cuda.get_device_name(0)
        facts["device memory free, GB"] = round(free / 1e9, 1)
        facts["device memory, GB"] = round(total / 1e9, 1)
        facts["nccl"] = _attempt(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    except Exception as error:
        return False, {**facts, "torch device": f"none: {str(error).splitlines()[0]}"}
    return True, facts


def _version_of(module: str) -> str:
    return _attempt(lambda: __import__(module).__version__)


def _attempt(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:
        return f"missing ({type(error).__name__})"


def _output(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _first_line_value(path: Path, name: str) -> str:
    for line in _text(path).splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
