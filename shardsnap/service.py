"""The snapshot service: the public verbs of shardsnap."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardsnap import _C
from shardsnap.collective import Agreement, Verdict
from shardsnap.device import caller_stream, host_is_stream, open_copy_device
from shardsnap.errors import ArenaFullError, CopyError, SnapshotError, UnknownVersionError
from shardsnap.generations import Generations, Version, check_version
from shardsnap.layout import Layout, LayoutCache, Select
from shardsnap.matching import Match, match_layouts, mismatch_error
from shardsnap.report import ArenaUse, RestoreReport, ServiceStats, VersionStats
from shardsnap.sizes import format_size, parse_size
from shardsnap.ticket import Ticket
from shardsnap.transfer import DevicePart, RestorePlan, SnapshotPlan, host_tensor, plan_restore, plan_snapshots

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# After a KeyboardInterrupt the copies still get this long to end, so that the weights are whole and may be freed.
_INTERRUPTED_COPY_SECONDS = 30.0


@dataclass(eq=False)
class _Snapshot:
    """One save of a version: where its bytes are, and the copies that bring them there."""

    generation: int
    plan: SnapshotPlan
    extent: _C.Extent
    copies: Sequence[_C.Ticket]
    ticket: Ticket


@dataclass(eq=False)
class _Held:
    """What is held of one version: the last save that is known to have succeeded, and newer ones in flight."""

    current: _Snapshot | None = None
    pending: list[_Snapshot] = field(default_factory=list)
    failure: CopyError | None = None  # of a save that failed in flight, until somebody has been told

    def settle(self) -> None:
        """Let the newest save that has ended well replace the one before; drop those that failed."""
        while self.pending and self.pending[0].ticket.done():
            snapshot = self.pending.pop(0)
            self.failure = snapshot.ticket.error
            if self.failure is None:
                self.current = snapshot

    @property
    def newest(self) -> _Snapshot | None:
        return self.pending[-1] if self.pending else self.current


@dataclass(eq=False)
class _Resources:
    """What must be given back in order, whether close() is called or the service is collected."""

    engines: dict[torch.device, _C.SnapshotEngine]
    devices: dict[torch.device, _C.CopyDevice]
    arena: _C.Arena
    agreement: Agreement | None
    held: dict[Version, _Held]
    guards: list[RemovableHandle]
    abandoned: list[Ticket] = field(default_factory=list)  # copies that read weights for a version nobody wants now
    process: int = field(default_factory=os.getpid)

    def release(self) -> None:
        if os.getpid() != self.process:
            return  # a fork inherits the objects, but neither the copy threads nor the pinned memory
        for engine in self.engines.values():
            engine.drain()
        for guard in self.guards:
            guard.remove()
        self.held.clear()
        self.abandoned.clear()
        self.arena.close()
        self.engines.clear()
        self.devices.clear()
        del self.arena  # it pins through a device, and closed services hold no stream and no context
        if self.agreement is not None:
            self.agreement.close()


class SnapshotService:
    """Keeps versions of a live model's weights in pinned host memory and puts any of them back in place.

    One service per rank and model. Construction is collective over ``process_group`` where torch.distributed is
    initialised: it makes one gloo group, and either succeeds on every rank or raises on every rank. It blocks while
    the arena is mapped, faulted in and pinned, so that no later save does any of that.

    All verbs may be called from any thread; they run one after the other.

    Args:
        model: a plain module, DDP, FSDP1 or FSDP2, on the CPU or on one CUDA device.
        snapshots: how many versions of the model's present layout fit. A save over an existing version needs room for
            both until the new copy is done. Default 2, unless ``capacity`` is given.
        capacity: the arena's size instead, in bytes or as text such as "48GiB".
        growth: how far the arena may grow in extra slabs when it is full, in bytes or as text. An extra slab costs
            mapping and pinning at that moment and is given back when its last snapshot is dropped.
        include: "parameters", "buffers" or both.
        select: which of those: None for all, "trainable", a list of glob patterns on names, or a predicate
            ``(name, tensor) -> bool``.
        pin: "prefer" pins where there is a CUDA device and logs a warning where the driver refuses, "require" raises
            instead, "never" leaves the memory pageable.
        numa_node: node for the arena; None takes the one nearest to the GPU.
        process_group: the ranks that hold shards of the model; None is the default group.
        timeout: seconds that a collective waits for a rank that does not come.

    Raises:
        ArenaFullError: the host has too little memory left; nothing was touched.
        PinningError: ``pin="require"`` and the memory cannot be pinned.
        DeviceUnavailableError: the model is on a device that cannot be used; the message says what is missing.
        UnsupportedTensorError: a tensor that cannot be copied bit for bit; the message names it.
        PeerRankError: another rank could not construct its service.
        TypeError, ValueError: an argument is not what it should be.
    """

    def __init__(
        self,
        model: nn.Module,
        snapshots: int | None = None,
        *,
        capacity: int | str | None = None,
        growth: int | str = 0,
        include: Sequence[str] = ("parameters", "buffers"),
        select: Select = None,
        pin: Literal["require", "prefer", "never"] = "prefer",
        numa_node: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._lock = threading.RLock()
        self._held: dict[Version, _Held] = {}
        self._copy_devices: dict[torch.device, _C.CopyDevice] = {}
        self._engines: dict[torch.device, _C.SnapshotEngine] = {}
        self._generations = Generations()
        self._plan: tuple[Layout, SnapshotPlan] | None = None
        self._restore_plans: dict[SnapshotPlan, tuple[Match, RestorePlan]] = {}
        self._mixed: str | None = None
        self._restoring: Sequence[_C.Ticket] = ()
        self._closed = False
        self._counts = dict.fromkeys(("saves", "restores", "bytes_saved", "bytes_restored"), 0)
        self._seconds = dict.fromkeys(("save", "restore"), 0.0)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if snapshots is not None and capacity is not None:
            raise ValueError("give snapshots or capacity, not both")
        if snapshots is not None and (isinstance(snapshots, bool) or not isinstance(snapshots, int) or snapshots < 1):
            raise ValueError(f"snapshots must be a whole number of at least 1, got {snapshots!r}")

        agreement = Agreement.over(process_group, timedelta(seconds=timeout))

        def open_rooms() -> _C.Arena:
            self._layouts = LayoutCache(model, include, select)
            plan = self._plan_of(self._layouts.current())
            for part in plan.parts:
                self._engine_for(part.device)
            room = plan.extent_bytes * (snapshots or 2) if capacity is None else parse_size(capacity)
            return self._make_arena(room, parse_size(growth), pin, numa_node)

        try:
            arena = _agree(agreement, Verdict("create a service"), open_rooms)
        except BaseException:
            if agreement is not None:
                agreement.close()
            raise
        self._resources = _Resources(self._engines, self._copy_devices, arena, agreement, self._held, guards=[])
        self._finalizer = weakref.finalize(self, self._resources.release)

    # ---------------------------------------------------------------------------------------------------- the verbs

    def save(self, version: Version, *, fence: Literal["stream", "optimizer"] = "stream") -> Ticket:
        """Copy the weights of this rank to the host as ``version``. Not collective.

        On a GPU the call returns once the copies are enqueued, ordered after the caller's current stream. On a CPU
        model it returns when the copy is done, or at once with ``fence="optimizer"``.

        An existing version is replaced only when the new copy has succeeded; a save that fails leaves it as it was.

        Args:
            version: the key, a str or an int.
            fence: what keeps the weights still while they are read. "stream": the caller's current stream waits for
                the copies (on a CPU model, the call does). "optimizer": only restore, fence() and the steps of
                optimizers given to guard() wait, so that forward and backward overlap the copy.

        Returns:
            A ticket to wait on; it may be dropped.

        Raises:
            ArenaFullError: no room; the numbers, who holds what, and what to do.
            UnsafeStateError: inside forward or backward, or the stream is capturing a CUDA graph.
            CopyError: a copy could not be enqueued, or the weights are mixed after a failed restore.
            SnapshotError: ``fence="optimizer"`` without a guarded optimizer, or the service is closed.
        """
        check_version(version)
        if fence not in ("stream", "optimizer"):
            raise ValueError(f'fence must be "stream" or "optimizer", got {fence!r}')
        started = time.perf_counter()
        with self._turn():
            # Counted before anything can fail: ranks whose saves failed must not look as if they held the new one.
            generation = self._generations.next(version)
            if fence == "optimizer" and not any(map(_is_attached, self._resources.guards)):
                raise SnapshotError('fence="optimizer" needs an optimizer that waits: call guard(optimizer) first')
            self._check_whole()
            self._settle()
            self._layouts.assert_safe()
            layout = self._layouts.current()
            plan = self._plan_of(layout)
            streams = [caller_stream(part.device) for part in plan.parts]
            extent = self._take_extent(version, plan)
            hold = fence == "stream"
            try:
                copies = [
                    self._engine_for(part.device).save(part.plan, extent, part.base, caller=stream, hold_caller=hold)
                    for part, stream in zip(plan.parts, streams, strict=True)
                ]
                if hold:
                    self._wait_where_host_is_stream(plan.parts, copies)
                # A stream that waits frees weights in its own order; otherwise they must not be freed while being read.
                ticket = Ticket(version, generation, copies, [] if hold else layout.hold())
                snapshot = _Snapshot(generation, plan, extent, copies, ticket)
                self._held.setdefault(version, _Held()).pending.append(snapshot)
            except BaseException:
                self._let_copies_end()
                raise
            self._settle()
            self._counts["saves"] += 1
            self._counts["bytes_saved"] += plan.nbytes
            self._seconds["save"] += time.perf_counter() - started
            return ticket

    def restore(self, version: Version, *, strict: bool = True, wait: bool = True, agree: bool = True) -> RestoreReport:
        """Put ``version`` back into the live weights, in place: addresses do not change.

        Collective where the service has peers, unless ``agree=False``: first the ranks agree that every one of them
        can restore the same save, then they copy. If one cannot, all raise and no weight has changed on any. All ranks
        pass the same ``wait`` and ``agree``.

        Args:
            version: the key.
            strict: a difference between the snapshot and the live model is an error. False: what does not fit is
                skipped and listed in the report, and other dtypes are converted as Tensor.copy_ does.
            wait: block the host until the weights of every rank are back. False: return once the copies are ordered
                before later work on the caller's current stream (a CPU model is done by then all the same).
            agree: False leaves out everything collective, for callers that know that all ranks hold the same.

        Returns:
            What was restored, converted and skipped on this rank.

        Raises:
            UnknownVersionError: this rank does not hold the version.
            LayoutMismatchError: every difference, by name.
            UnsafeStateError: inside forward or backward, or the stream is capturing a CUDA graph.
            PeerRankError: another rank cannot restore, or ranks hold different saves of the version.
            CopyError: the save failed in flight (nothing has changed), or a copy into the weights failed (they may be
                mixed; the next restore mends them).
        """
        check_version(version)
        started = time.perf_counter()
        with self._turn():
            agreement = self._resources.agreement if agree else None
            held = self._held.get(version)
            newest = held.newest if held is not None else None
            verb = "restore" if wait else "restore (wait=False)"  # ranks that differ in it would wait for each other
            verdict = Verdict(verb, version, newest.generation if newest is not None else 0)
            snapshot, layout, match, plan = _agree(agreement, verdict, lambda: self._prepare_restore(version, strict))
            try:
                self._write_weights(snapshot, layout, plan, wait)
                failure = None
            except BaseException as error:
                failure = error
            self._finish(agreement if wait else None, verdict, failure)
            if not match.skipped:
                self._mixed = None
            report = RestoreReport(
                version=version,
                generation=snapshot.generation,
                restored=plan.restored,
                converted=plan.converted,
                skipped=match.skipped,
                nbytes=plan.nbytes,
                seconds=time.perf_counter() - started,
            )
            self._counts["restores"] += 1
            self._counts["bytes_restored"] += plan.nbytes
            self._seconds["restore"] += report.seconds
            return report

    def drop(self, version: Version) -> None:
        """Forget ``version``. Its memory is free once no copy uses it. Not collective, does not block.

        Raises:
            UnknownVersionError: it is not held.
        """
        check_version(version)
        with self._turn():
            held = self._held.pop(version, None)
            if held is None:
                raise self._unknown(version)
            # Until they end, these copies read weights that the model may let go of.
            self._resources.abandoned += [snapshot.ticket for snapshot in held.pending]
            self._settle()

    def versions(self) -> tuple[Version, ...]:
        """The keys that are held, saves in flight included, in the order of their first save."""
        with self._turn():
            self._settle()
            return tuple(version for version, held in self._held.items() if held.newest is not None)

    def guard(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Make every ``optimizer.step`` wait for the saves in flight before it writes; see ``save(fence=...)``.

        On a GPU the step's stream waits, not the host. The optimizer does not keep the service alive.

        Returns:
            A handle whose remove() ends the guard; close() removes it too.
        """
        service = weakref.ref(self)

        def wait_for_saves(*_: Any) -> None:
            alive = service()
            if alive is not None and not alive._closed:
                alive.fence()

        with self._turn():
            handle: RemovableHandle = optimizer.register_step_pre_hook(wait_for_saves)
            attached = [guard for guard in self._resources.guards if _is_attached(guard)]
            self._resources.guards[:] = [*attached, handle]
            return handle

    def fence(self) -> None:
        """Make later work on the caller's current stream wait for every save in flight: call it before writing weights.

        On a GPU the host is not blocked; on a CPU model the call blocks until the saves are done.

        Raises:
            CopyError: a save failed (only where the host waits for it).
        """
        with self._turn():
            for device, engine in self._engines.items():
                if not host_is_stream(device):
                    engine.fence(caller_stream(device))
            for held in self._held.values():
                for snapshot in held.pending:
                    self._wait_where_host_is_stream(snapshot.plan.parts, snapshot.copies)
            self._settle()

    def stats(self) -> ServiceStats:
        """What is held, how much memory it takes, and what has been moved so far. Does not block."""
        with self._turn():
            self._settle()
            arena = self._resources.arena.stats()
            return ServiceStats(
                devices=tuple(device.describe() for device in self._copy_devices.values()),
                versions=tuple(
                    VersionStats(version, newest.generation, newest.plan.nbytes, bool(held.pending))
                    for version, held in self._held.items()
                    if (newest := held.newest) is not None
                ),
                arena=ArenaUse(**{name: getattr(arena, name) for name in ArenaUse.__dataclass_fields__}),
                save_seconds=self._seconds["save"],
                restore_seconds=self._seconds["restore"],
                copies_in_flight=sum(engine.in_flight() for engine in self._engines.values()),
                **self._counts,
            )

    def close(self) -> None:
        """Wait for the copies in flight, drop every version and give all host memory back. Not collective.

        Calling it again does nothing; any other verb raises afterwards. In a fork it does nothing either.
        """
        if self._is_forked():
            return
        with self._lock:
            self._closed = True
            self._layouts.forget()
            self._plan = None
            self._restore_plans.clear()
            self._finalizer()

    def __enter__(self) -> SnapshotService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- opening

    def _make_arena(self, capacity: int, growth: int, pin: str, numa_node: int | None) -> _C.Arena:
        pinning = [device for device in self._copy_devices.values() if device.can_register]
        device = pinning[0] if pinning else None
        node = numa_node if numa_node is not None else (device.numa_node if device is not None else -1)
        arena = _C.Arena(device, capacity=capacity, growth=growth, numa_node=node, pin=pin)
        if reason := arena.stats().pin_failure:
            logger.warning("snapshots are in pageable memory, copies will be slow: %s", reason)
        return arena

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One verb at a time, none after close() and none in a fork."""
        if self._is_forked():  # asked before the lock, which another thread may have held at the fork
            raise SnapshotError("the service belongs to the process that created it; this one is a fork of it")
        with self._lock:
            if self._closed:
                raise SnapshotError("the service is closed")
            yield

    def _is_forked(self) -> bool:
        return os.getpid() != self._resources.process

    # -------------------------------------------------------------------------------------------------------- saving

    def _plan_of(self, layout: Layout) -> SnapshotPlan:
        if self._plan is None or self._plan[0] is not layout:
            self._plan = (layout, plan_snapshots(layout))
            self._restore_plans.clear()  # they point into the old layout
        return self._plan[1]

    def _take_extent(self, version: Version, plan: SnapshotPlan) -> _C.Extent:
        try:
            return self._resources.arena.allocate(plan.extent_bytes)
        except ArenaFullError as error:
            holders = [
                f"{held_version!r} {format_size(held.newest.plan.extent_bytes)}"
                for held_version, held in self._held.items()
                if held.newest is not None
            ]
            message = (
                f"no room to save {version!r}: {error} Held: {', '.join(holders) or 'nothing'}. A save over an existing"
                " version needs room for both until the new copy is done"
            )
            raise ArenaFullError(message, error.asked, error.free, error.largest_free) from None

    def _settle(self) -> None:
        for held in self._held.values():
            held.settle()
        self._resources.abandoned[:] = [ticket for ticket in self._resources.abandoned if not ticket.done()]

    @staticmethod
    def _wait_where_host_is_stream(parts: Sequence[DevicePart], copies: Sequence[_C.Ticket]) -> None:
        for part, copy in zip(parts, copies, strict=True):
            if host_is_stream(part.device):
                copy.wait()

    def _let_copies_end(self) -> bool:
        """Wait, but not for ever, so that nothing reads or writes the weights any more; return whether it ended."""
        deadline = time.monotonic() + _INTERRUPTED_COPY_SECONDS
        while any(engine.in_flight() for engine in self._engines.values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    # ----------------------------------------------------------------------------------------------------- restoring

    def _prepare_restore(self, version: Version, strict: bool) -> tuple[_Snapshot, Layout, Match, RestorePlan]:
        """Everything that can refuse a restore; changes nothing."""
        self._layouts.assert_safe()
        snapshot = self._find(version)
        layout = self._layouts.current()
        match, plan = self._match(snapshot, layout)
        for part in plan.parts:
            caller_stream(part.device)  # refuses a stream that captures a CUDA graph
            self._engine_for(part.device)
        if strict and match.differences:
            raise mismatch_error(version, match.differences)
        return snapshot, layout, match, plan

    def _find(self, version: Version) -> _Snapshot:
        held = self._held.get(version)
        if held is not None:
            held.settle()
            if held.failure is not None:
                failure, held.failure = held.failure, None
                rest = "" if held.newest is None else "; the save before it is intact and the next restore gives it"
                raise CopyError(f"{failure}{rest}")
            if held.newest is not None:
                return held.newest
        raise self._unknown(version)

    def _unknown(self, version: Version) -> UnknownVersionError:
        known = ", ".join(map(repr, self.versions())) or "none"
        return UnknownVersionError(f"no snapshot {version!r} is held; held versions: {known}")

    def _match(self, snapshot: _Snapshot, layout: Layout) -> tuple[Match, RestorePlan]:
        self._plan_of(layout)  # forgets plans into an older layout
        if snapshot.plan not in self._restore_plans:
            match = match_layouts(snapshot.plan.layout, layout)
            self._restore_plans[snapshot.plan] = (match, plan_restore(snapshot.plan, layout, match))
        return self._restore_plans[snapshot.plan]

    def _write_weights(self, snapshot: _Snapshot, layout: Layout, plan: RestorePlan, wait: bool) -> None:
        self._layouts.prepare_for_write()
        self._quiet_device_reads(plan.parts)
        torch.autograd.graph.increment_version(layout.versioned)
        copies: list[_C.Ticket] = []
        complete = False
        before, self._mixed = self._mixed, f"restoring {snapshot.ticket.version!r} was interrupted"
        try:
            for part in plan.parts:
                stream = caller_stream(part.device)
                engine = self._engine_for(part.device)
                copies.append(engine.restore(part.plan, snapshot.extent, part.base, caller=stream))
            if plan.conversions:
                self._convert(snapshot, layout, plan)
            complete = True
            if wait:
                for copy in copies:
                    copy.wait()
            else:
                self._wait_where_host_is_stream(plan.parts, copies)
        except BaseException as error:
            if isinstance(error, Exception):
                self._mixed = f"restoring {snapshot.ticket.version!r} failed: {error}"
            ended = self._let_copies_end()
            if complete and ended and not any(copy.error() for copy in copies):
                self._mixed = before  # interrupted while it waited for copies that have all ended well
            raise
        self._mixed = before
        self._restoring = copies

    def _engine_for(self, device: torch.device) -> _C.SnapshotEngine:
        if device not in self._engines:  # at first, and where the model or a part of it has moved since
            self._copy_devices[device] = open_copy_device(device)
            self._engines[device] = _C.SnapshotEngine(self._copy_devices[device])
        return self._engines[device]

    def _check_whole(self) -> None:
        """Refuse to save weights that a failed restore may have left mixed."""
        ended = [copy for copy in self._restoring if copy.done()]
        self._restoring = [copy for copy in self._restoring if copy not in ended]
        reasons = [reason for copy in ended if (reason := copy.error()) is not None]
        if reasons:
            self._mixed = f"a restore failed in flight: {'; '.join(reasons)}"
        if self._mixed is not None:
            raise CopyError(f"the weights may be mixed: {self._mixed}. Restore a version first, or load a checkpoint")

    @staticmethod
    def _quiet_device_reads(parts: Sequence[DevicePart]) -> None:
        """Weights offloaded to the host are gathered by copies that a GPU may still be reading them with."""
        if any(host_is_stream(part.device) for part in parts) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    @staticmethod
    def _convert(snapshot: _Snapshot, layout: Layout, plan: RestorePlan) -> None:
        """Write entries of another dtype or stride order as Tensor.copy_ does, through the host."""
        snapshot.ticket.wait()
        with torch.no_grad():
            for saved_index, live_index in plan.conversions:
                saved = host_tensor(snapshot.extent, snapshot.plan, snapshot.plan.layout.entries[saved_index])
                layout.local_tensor(live_index).copy_(saved)

    def _finish(self, agreement: Agreement | None, verdict: Verdict, failure: BaseException | None) -> None:
        """The barrier at the end of a restore, at which the ranks also learn of a copy that failed."""
        if isinstance(failure, KeyboardInterrupt):
            raise failure

        def outcome() -> None:
            if failure is not None:
                raise failure

        finished = Verdict("finish restoring", verdict.version, verdict.generation)
        _agree(agreement, finished, outcome)


def _is_attached(handle: RemovableHandle) -> bool:
    return handle.id in (handle.hooks_dict_ref() or {})


def _agree(agreement: Agreement | None, verdict: Verdict, attempt: Callable[[], Result]) -> Result:
    """Make the attempt, tell the peers how it went, and return its result only where it went well on every rank.

    Raises:
        Exception: what the attempt raised on this rank.
        PeerRankError: it went well here but not on another rank.
    """
    if agreement is None:
        return attempt()
    try:
        result = attempt()
    except Exception as error:
        failed = Verdict(verdict.verb, verdict.version, verdict.generation, f"{type(error).__name__}: {error}")
        try:
            agreement.exchange(failed)
        except Exception as peers:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(str(peers))
        raise
    agreement.exchange(verdict)
    return result
