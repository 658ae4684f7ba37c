"""The floor: the least time in which this machine can move the same bytes."""

from benchmarks.floor.floor import Block, Copies, Floor

__all__ = ["Block", "Copies", "Floor"]
