"""What may be restored into what: a saved layout against the live one, name by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardsnap.errors import LayoutMismatchError
from shardsnap.layout import Entry, Layout


@dataclass(frozen=True)
class Difference:
    """One way in which a snapshot and the live model differ.

    Attributes:
        name: the parameter or buffer, or "" for the layout as a whole.
        kind: "missing": live, not in the snapshot. "unexpected": in the snapshot, not live. "shape", "dtype",
            "placement": both have it, differently. "tied": live names share bytes that the snapshot holds apart.
            "layout": another wrapper.
        detail: a sentence that says both sides.
    """

    name: str
    kind: Literal["missing", "unexpected", "shape", "dtype", "placement", "tied", "layout"]
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.name else self.detail


@dataclass(frozen=True)
class Match:
    """How a saved layout fits a live one.

    Attributes:
        exact: every region is the same but for its address, so whole regions can be copied.
        pairs: (saved index, live index) of the entries that can be restored, in the live order.
        differences: everything that differs, in the live order.
    """

    exact: bool
    pairs: tuple[tuple[int, int], ...]
    differences: tuple[Difference, ...]

    @property
    def skipped(self) -> tuple[Difference, ...]:
        """Differences whose name is not restored; a different dtype is converted instead."""
        return tuple(difference for difference in self.differences if difference.kind not in ("dtype", "layout"))


def match_layouts(saved: Layout, live: Layout) -> Match:
    """Compare two layouts; neither is changed. Never raises: what to do with differences is the caller's choice."""
    if saved.kind == live.kind and saved.entries == live.entries and _same_sizes(saved, live):
        return Match(exact=True, pairs=tuple((index, index) for index in range(len(live.entries))), differences=())
    differences: list[Difference] = []
    if saved.kind != live.kind:
        differences.append(Difference("", "layout", f"saved from {saved.kind}, the live model is {live.kind}"))
    saved_index = {entry.name: index for index, entry in enumerate(saved.entries)}
    pairs: list[tuple[int, int]] = []
    for live_position, entry in enumerate(live.entries):
        saved_position = saved_index.pop(entry.name, None)
        if saved_position is None:
            differences.append(Difference(entry.name, "missing", "in the live model, not in the snapshot"))
            continue
        found = list(_compare(saved.entries[saved_position], entry))
        differences.extend(found)
        if all(difference.kind == "dtype" for difference in found):
            pairs.append((saved_position, live_position))
    differences.extend(Difference(name, "unexpected", "in the snapshot, not in the live model") for name in saved_index)
    untied = _untied_in_snapshot(saved, live, pairs)
    differences.extend(untied.values())
    kept = tuple(pair for pair in pairs if live.entries[pair[1]].name not in untied)
    return Match(exact=False, pairs=kept, differences=tuple(differences))


def mismatch_error(version: str | int, differences: Iterable[Difference]) -> LayoutMismatchError:
    """The error that lists every difference, one a line, and the way out."""
    lines = [f"  {difference}" for difference in differences]
    return LayoutMismatchError(
        f"the snapshot {version!r} does not fit the live model; {len(lines)} difference(s):\n"
        + "\n".join(lines)
        + "\nNothing has changed. Restore with strict=False to skip what does not fit and to convert dtypes,"
        + " or save the version again."
    )


def _same_sizes(saved: Layout, live: Layout) -> bool:
    return [region.nbytes for region in saved.regions] == [region.nbytes for region in live.regions]


def _compare(saved: Entry, live: Entry) -> Iterable[Difference]:
    name = live.name
    if saved.shape != live.shape:
        yield Difference(name, "shape", f"saved with shape {saved.shape}, live {live.shape}")
    if saved.dtype != live.dtype:
        yield Difference(name, "dtype", f"saved as {saved.dtype}, live {live.dtype}")
    if saved.placement != live.placement or (saved.shape == live.shape and saved.local_shape != live.local_shape):
        yield Difference(
            name,
            "placement",
            f"saved as {_describe_placement(saved)}, live {_describe_placement(live)}",
        )


def _describe_placement(entry: Entry) -> str:
    return f"{entry.placement or 'a whole tensor'} with local shape {entry.local_shape}"


def _untied_in_snapshot(saved: Layout, live: Layout, pairs: list[tuple[int, int]]) -> dict[str, Difference]:
    """Later names of live tied weights whose saved bytes are somewhere else than those of the first name."""
    untied: dict[str, Difference] = {}
    by_bytes: dict[tuple[int, int], int] = {}
    for saved_position, live_position in pairs:
        entry = live.entries[live_position]
        if entry.nbytes == 0:
            continue
        first = by_bytes.setdefault((entry.region, entry.offset), saved_position)
        one, other = saved.entries[first], saved.entries[saved_position]
        if (one.region, one.offset) != (other.region, other.offset):
            detail = f"shares its bytes with {one.name} in the live model, but the snapshot holds two values"
            untied[entry.name] = Difference(entry.name, "tied", detail)
    return untied
