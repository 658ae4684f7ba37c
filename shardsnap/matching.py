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
    """Names that share live bytes with an earlier name, while their saved bytes lie otherwise to each other."""
    untied: dict[str, Difference] = {}
    for group in _sharing(live, [pair for pair in pairs if live.entries[pair[1]].nbytes]):
        kept: list[tuple[int, int]] = []
        for pair in sorted(group, key=lambda pair: pair[1]):
            clash = next((other for other in kept if _disagree(saved, live, other, pair)), None)
            if clash is None:
                kept.append(pair)
            else:
                name, other_name = live.entries[pair[1]].name, live.entries[clash[1]].name
                detail = f"shares its bytes with {other_name} in the live model, but the snapshot holds two values"
                untied[name] = Difference(name, "tied", detail)
    return {name: untied[name] for _, position in pairs if (name := live.entries[position].name) in untied}


def _sharing(live: Layout, pairs: list[tuple[int, int]]) -> Iterable[list[tuple[int, int]]]:
    """The pairs in groups whose live bytes overlap, directly or through others of the group."""
    groups: list[list[tuple[int, int]]] = []
    region, end = -1, 0
    for pair in sorted(pairs, key=lambda pair: (live.entries[pair[1]].region, live.entries[pair[1]].offset)):
        entry = live.entries[pair[1]]
        if entry.region == region and entry.offset < end:
            groups[-1].append(pair)
        else:
            groups.append([pair])
            region, end = entry.region, 0
        end = max(end, _end(entry))
    return groups


def _disagree(saved: Layout, live: Layout, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two entries of a group share live bytes, but are not as many elements apart in the snapshot."""
    saved_one, saved_other = saved.entries[one[0]], saved.entries[other[0]]
    live_one, live_other = live.entries[one[1]], live.entries[other[1]]
    if max(live_one.offset, live_other.offset) >= min(_end(live_one), _end(live_other)):
        return False
    saved_distance = (saved_other.offset - saved_one.offset) * live_other.dtype.itemsize
    live_distance = (live_other.offset - live_one.offset) * saved_other.dtype.itemsize
    return saved_one.region != saved_other.region or saved_distance != live_distance


def _end(entry: Entry) -> int:
    return entry.offset + entry.nbytes
