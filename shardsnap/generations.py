"""Which save of a version this is, so that ranks notice when they hold different ones."""

from collections import OrderedDict

Version = str | int

# Keys that came and went are remembered up to this many, so that a trainer that names versions by step does not grow.
_REMEMBERED = 4096


def check_version(version: Version) -> Version:
    """``version`` itself.

    Raises:
        TypeError: it is neither a str nor an int; a bool is not an int here.
    """
    if isinstance(version, bool) or not isinstance(version, str | int):
        raise TypeError(f"a version is a str or an int, got {type(version).__name__}: {version!r}")
    return version


class Generations:
    """Counts the saves of each version that were tried, whether they succeeded or not.

    Ranks that run the same program try the same saves, so equal numbers mean the same save. Counting goes on after a
    drop: a rank that missed a drop and a save must not look as if it held the new one.
    """

    def __init__(self) -> None:
        self._tried: OrderedDict[Version, int] = OrderedDict()
        self._floor = 0

    def next(self, version: Version) -> int:
        """The generation of the save that is being tried now, from 1 on."""
        generation = self._tried.get(version, self._floor) + 1
        self._tried[version] = generation
        self._tried.move_to_end(version)
        if len(self._tried) > _REMEMBERED:
            _, forgotten = self._tried.popitem(last=False)
            self._floor = max(self._floor, forgotten)
        return generation
