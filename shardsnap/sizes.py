"""Sizes in bytes, as a person writes and reads them."""

import re

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Bytes of ``size``: a number, or text such as "48GiB" (1024**3), "48GB" (1e9) or "512M" (1024**2).

    Raises:
        ValueError: it is not a size, or it is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(f"a size cannot be negative, got {size}")
        return size
    matched = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if matched is None or matched[2] not in _UNITS:
        raise ValueError(f'not a size in bytes: {size!r}; write a number, or text such as "48GiB" or "500MB"')
    return int(float(matched[1]) * _UNITS[matched[2]])


def format_size(nbytes: float) -> str:
    """``nbytes`` with a binary unit, such as "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
