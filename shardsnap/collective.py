"""Agreement between ranks before a byte moves: one small all-gather, on a gloo group of its own."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardsnap.errors import PeerRankError
from shardsnap.generations import Version


@dataclass(frozen=True)
class Verdict:
    """What one rank brings to an agreement.

    Attributes:
        verb: what it is about to do, such as "restore" or "finish".
        version: the key, or None where the verb has none.
        generation: which save of the version this rank holds, 0 for none.
        failure: why this rank cannot go on, or None.
    """

    verb: str
    version: Version | None = None
    generation: int = 0
    failure: str | None = None


class Agreement:
    """Lets every rank of a group see every rank's verdict. All calls are collective and block the host."""

    def __init__(self, process_group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        """Make the gloo group; collective over ``process_group`` (None: the default group).

        Args:
            process_group: the ranks that hold shards of one model.
            timeout: how long a collective waits for a rank that does not come.
        """
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._group: dist.ProcessGroup = dist.new_group(
            ranks=ranks,
            timeout=timeout,
            backend="gloo",
            # Only the members call, so only they may synchronise; over the default group everybody is a member.
            use_local_synchronization=process_group is not None,
        )
        self._ranks = ranks

    @classmethod
    def over(cls, process_group: dist.ProcessGroup | None, timeout: timedelta) -> Agreement | None:
        """An agreement over ``process_group``, or None where there is no other rank to agree with."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if dist.get_world_size(process_group) == 1:
            return None
        return cls(process_group, timeout)

    def exchange(self, verdict: Verdict) -> None:
        """Return where every rank can go on; on any failure every rank raises.

        Raises:
            PeerRankError: which ranks cannot go on and why, or which of them hold another generation or came with
                another verb or version. A rank whose own verdict has a failure gets it too, and raises its own error
                instead.
        """
        # One vector a rank: whether it failed, what it came for, and which save it holds.
        mine = torch.tensor(
            [verdict.failure is not None, _digest(verdict.verb), _digest(verdict.version), verdict.generation],
            dtype=torch.int64,
        )
        gathered = [torch.empty_like(mine) for _ in self._ranks]
        try:
            dist.all_gather(gathered, mine, group=self._group)
        except RuntimeError as error:  # gloo: a peer is gone, or did not come in time
            raise PeerRankError(f"a rank did not come to {verdict.verb} {verdict.version!r}: {error}") from error
        rows = torch.stack(gathered)
        if not rows[:, 0].any() and bool((rows == rows[0]).all()):
            return
        # Every rank sees the same rows, so every rank comes here.
        verdicts: list[Verdict | None] = [None] * len(self._ranks)
        dist.all_gather_object(verdicts, verdict, group=self._group)
        raise PeerRankError(_explain([(rank, held) for rank, held in zip(self._ranks, verdicts, strict=True) if held]))

    def close(self) -> None:
        """Give up the gloo group; not collective."""
        if dist.is_initialized():
            # The program may have destroyed every group since, this one included.
            with contextlib.suppress(ValueError, AssertionError, RuntimeError):
                dist.destroy_process_group(self._group)


def _digest(key: Version | None) -> int:
    """63 bits that are equal on every rank for equal keys; hash() is salted per process."""
    text = f"{type(key).__name__}:{key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _explain(verdicts: list[tuple[int, Verdict]]) -> str:
    verb, version = verdicts[0][1].verb, verdicts[0][1].version
    action = verb if version is None else f"{verb} {version!r}"
    failures = [(rank, verdict) for rank, verdict in verdicts if verdict.failure is not None]
    if failures:
        reasons = "\n".join(f"  rank {rank}: {verdict.failure}" for rank, verdict in failures)
        return f"{_rank_list([rank for rank, _ in failures])} cannot {action}:\n{reasons}"
    if any((verdict.verb, verdict.version) != (verb, version) for _, verdict in verdicts):
        calls = ", ".join(f"rank {rank} {verdict.verb} {verdict.version!r}" for rank, verdict in verdicts)
        return f"the ranks do not do the same: {calls}. Every rank must make the same calls in the same order"
    newest = max(verdict.generation for _, verdict in verdicts)
    behind = [rank for rank, verdict in verdicts if verdict.generation < newest]
    held = ", ".join(f"rank {rank} holds generation {verdict.generation}" for rank, verdict in verdicts)
    return (
        f"the ranks hold different saves of {version!r}: {held}. {_rank_list(behind)} missed a later save, and mixing"
        " the two would mix weights. Save the version again on every rank, or drop it"
    )


def _rank_list(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
