"""The errors that shardsnap raises. All of them are `SnapshotError`."""


class SnapshotError(Exception):
    """Base of every error that shardsnap raises on purpose."""


class UnknownVersionError(SnapshotError, KeyError):
    """No snapshot of that version is held; the message lists the versions that are."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would print the repr, quotes included


class ArenaFullError(SnapshotError, MemoryError):
    """No room for the bytes asked for, in the arena or on the host.

    Attributes:
        asked: bytes asked for.
        free: bytes free, in all.
        largest_free: bytes of the largest single extent that would still fit.
    """

    def __init__(self, message: str, asked: int = 0, free: int = 0, largest_free: int = 0) -> None:
        super().__init__(message)
        self.asked = asked
        self.free = free
        self.largest_free = largest_free


class LayoutMismatchError(SnapshotError, ValueError):
    """The snapshot does not fit the live model. The message lists every difference, by parameter name."""


class UnsafeStateError(SnapshotError):
    """The model is in a state in which its weights must not be read or written, such as inside forward."""


class UnsupportedTensorError(SnapshotError, TypeError):
    """A tensor that shardsnap cannot copy bit for bit (meta, sparse, quantized, overlapping); the message names it."""


class UnsupportedTorchError(SnapshotError):
    """This torch lacks an internal that a layout needs; the message names the version it was written for."""


class PinningError(SnapshotError):
    """The driver refused to pin host memory; the message gives the limits and what to do."""


class PeerRankError(SnapshotError):
    """Another rank could not take part; the message names the rank and its reason. Nothing has changed anywhere."""


class CopyError(SnapshotError):
    """A copy failed; the message has the driver's name for the reason."""


class DeviceUnavailableError(SnapshotError):
    """The device of the model cannot be used: no driver, no such device, or a driver that does not start."""
