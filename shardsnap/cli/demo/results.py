"""The figures of a run, as they are printed and written to JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

WAYS = ("verl-style", "shardsnap")


@dataclass(frozen=True)
class Environment:
    """Where the figures come from.

    Attributes:
        torch: its version.
        device: what the model is on.
        copy_device: what shardsnap copies with.
        torch_threads: per rank, which the verl-style helpers copy with on a CPU.
    """

    torch: str
    device: str
    copy_device: str
    torch_threads: int


@dataclass(frozen=True)
class VerbTime:
    """One verb of one way.

    Attributes:
        calls: how many, in all cycles.
        calls_per_cycle: how many of them in one.
        seconds: median of the calls, each as long as its slowest rank took.
        nbytes: that a call moves, on the rank that has most.
    """

    calls: int
    calls_per_cycle: int
    seconds: float
    nbytes: int

    @property
    def gb_per_s(self) -> float:
        """Bytes of the rank over seconds, in 1e9 bytes a second."""
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True)
class WrapperResult:
    """One wrapper, all three ways.

    Attributes:
        wrapper: as --wrapper takes it.
        parameters: elements of all weights, tied ones once.
        open_seconds: what constructing the SnapshotService took, once; the slowest rank.
        ways: "verl-style" and "shardsnap", with the time per verb.
        mini_batches: optimizer steps.
        moved: of those, how many had live weights that no longer gave old_log_prob, on the rank with fewest.
        compared: tensors that every rank compared with the reference, per way.
        differences: per way, the names of those that are not equal bit for bit on some rank.
    """

    wrapper: str
    parameters: int
    open_seconds: float
    ways: dict[str, dict[str, VerbTime]]
    mini_batches: int
    moved: int
    compared: int
    differences: dict[str, list[str]]

    @property
    def bit_exact(self) -> bool:
        """Whether all three ways gave the same bits."""
        return not any(self.differences.values())

    def seconds_per_cycle(self, way: str) -> float:
        """Return the medians times the calls of one cycle, over all verbs."""
        return sum(verb.seconds * verb.calls_per_cycle for verb in self.ways[way].values())

    def as_json(self) -> dict[str, Any]:
        """Return everything, rates and totals included."""
        ways: dict[str, Any] = {}
        for way, verbs in self.ways.items():
            ways[way] = {name: asdict(verb) | {"gb_per_s": verb.gb_per_s} for name, verb in verbs.items()}
        totals = {way: self.seconds_per_cycle(way) for way in self.ways}
        return asdict(self) | {"ways": ways, "seconds_per_cycle": totals, "bit_exact": self.bit_exact}
