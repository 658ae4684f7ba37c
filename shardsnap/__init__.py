"""GPU-memory snapshots for PyTorch: keep versions of a live model's weights, and put any of them back in place."""

from shardsnap.errors import (
    ArenaFullError,
    CopyError,
    DeviceUnavailableError,
    LayoutMismatchError,
    PeerRankError,
    PinningError,
    SnapshotError,
    UnknownVersionError,
    UnsafeStateError,
    UnsupportedTensorError,
    UnsupportedTorchError,
)
from shardsnap.matching import Difference
from shardsnap.report import ArenaUse, RestoreReport, ServiceStats, VersionStats
from shardsnap.service import SnapshotService
from shardsnap.ticket import Ticket

__version__ = "0.1.0"

__all__ = [
    "ArenaFullError",
    "ArenaUse",
    "CopyError",
    "DeviceUnavailableError",
    "Difference",
    "LayoutMismatchError",
    "PeerRankError",
    "PinningError",
    "RestoreReport",
    "ServiceStats",
    "SnapshotError",
    "SnapshotService",
    "Ticket",
    "UnknownVersionError",
    "UnsafeStateError",
    "UnsupportedTensorError",
    "UnsupportedTorchError",
    "VersionStats",
]
