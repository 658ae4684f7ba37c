"""How much host memory there is, by the kernel and by the control group."""

from __future__ import annotations

from pathlib import Path

_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def total_bytes() -> int:
    """Of the machine, whatever a control group allows."""
    return _of_kernel("MemTotal")


def available_bytes() -> int:
    """What this process may still take."""
    free = [_of_kernel("MemAvailable")]
    for limit, used in _GROUPS:
        try:
            free.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(0, min(free))


def _of_kernel(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
