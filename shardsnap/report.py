"""What a restore did, and how a service stands."""

from __future__ import annotations

from dataclasses import dataclass

from shardsnap.generations import Version
from shardsnap.matching import Difference
from shardsnap.sizes import format_size


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did on this rank.

    Attributes:
        version, generation: what was restored.
        restored: names of parameters and buffers that now hold the saved values.
        converted: those of them whose dtype differed, so that the values were converted as Tensor.copy_ does.
        skipped: what was not restored and why; empty unless strict=False.
        nbytes: bytes written.
        seconds: host time of the call: the whole restore with wait=True, only the enqueueing with wait=False on a GPU.
    """

    version: Version
    generation: int
    restored: tuple[str, ...]
    converted: tuple[str, ...]
    skipped: tuple[Difference, ...]
    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """``nbytes`` over ``seconds``, in 1e9 bytes a second; meaningful after wait=True."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        text = f"restored {len(self.restored)} names ({format_size(self.nbytes)}) of {self.version!r}"
        text += f" in {self.seconds * 1e3:.2f} ms"
        for word, names in (("converted", self.converted), ("skipped", self.skipped)):
            if names:
                text += f"; {word} {', '.join(str(name) for name in names)}"
        return text


@dataclass(frozen=True)
class VersionStats:
    """One version that a service holds.

    Attributes:
        version: its key.
        generation: which save of the key it is.
        nbytes: bytes of weights; the arena holds at most 1% more.
        in_flight: the save has not ended yet.
    """

    version: Version
    generation: int
    nbytes: int
    in_flight: bool


@dataclass(frozen=True)
class ArenaUse:
    """Host memory of a service, in bytes.

    Attributes:
        limit: the most that may be mapped, growth included.
        mapped: held from the system now.
        used: in snapshots, of those mapped.
        free: mapped and not used.
        largest_free: the largest snapshot that fits without mapping more.
        pinned: registered with the CUDA driver.
        slabs: mappings.
        numa_node: the node that the slabs are bound to, or -1.
        pin_failure: why nothing is pinned although pin="prefer" asked for it; "" otherwise.
    """

    limit: int
    mapped: int
    used: int
    free: int
    largest_free: int
    pinned: int
    slabs: int
    numa_node: int
    pin_failure: str


@dataclass(frozen=True)
class ServiceStats:
    """How a service stands.

    Attributes:
        devices: what copies, as text.
        versions: what is held, in the order of the first save.
        arena: host memory.
        saves, restores: how many succeeded in being enqueued.
        bytes_saved, bytes_restored: bytes that they moved.
        save_seconds, restore_seconds: host time spent inside the calls.
        copies_in_flight: copies not known to have ended.
    """

    devices: tuple[str, ...]
    versions: tuple[VersionStats, ...]
    arena: ArenaUse
    saves: int
    restores: int
    bytes_saved: int
    bytes_restored: int
    save_seconds: float
    restore_seconds: float
    copies_in_flight: int
