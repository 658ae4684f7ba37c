"""What the kernel says about memory."""

from __future__ import annotations

import resource
from pathlib import Path

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The most that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def huge_pages_setting() -> str:
    """When memory gets transparent huge pages: "always", "madvise", "never", or "unknown"."""
    if not _HUGE_PAGES.exists():
        return "unknown"
    setting = _HUGE_PAGES.read_text()
    return setting[setting.index("[") + 1 : setting.index("]")]
