"""The check in front of torch's private attributes: a torch that lacks one is named, not met with an AttributeError."""

from __future__ import annotations

import torch

from shardsnap.errors import UnsupportedTorchError

WRITTEN_FOR = "torch 2.6 to 2.13"


def require(owner: object, *attributes: str) -> None:
    """Check that `owner` has all of the private `attributes` that a layout is about to read.

    Raises:
        UnsupportedTorchError: one is missing; the message names it, its owner and the versions of torch known to work.
    """
    missing = [attribute for attribute in attributes if not hasattr(owner, attribute)]
    if missing:
        what = owner.__name__ if hasattr(owner, "__name__") else type(owner).__name__
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {', '.join(f'{what}.{attribute}' for attribute in missing)}; "
            f"this layout was written for {WRITTEN_FOR}"
        )
