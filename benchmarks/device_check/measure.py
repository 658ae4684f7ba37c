"""Copies of a whole model over every path, in rounds, so that a busy machine slows all of them alike."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_check.copy_paths import CopyPath, DcpStager, Floor, Shardsnap, SlimeStyle, VerlStyle, Wait
from benchmarks.device_check.parts import PROGRESS
from benchmarks.device_check.report import write_whole
from benchmarks.device_check.workload import Bf16Weights, Size, choose_size
from benchmarks.stamps import check_equal, check_stamp, stamp

_MARKS = 250  # whole numbers up to this are exact in bf16


@dataclass
class Row:
    """One path and verb.

    Attributes:
        path, verb: what.
        nbytes: that one call moves.
        floor: of its direction, the key of another row; "" for the floor itself.
        note: what else there is to say, an error above all.
        first_seconds: of the first call.
        blocked, rounds: seconds of each later call, until it returned and until it was done.
    """

    path: str
    verb: str
    nbytes: int
    floor: str = ""
    note: str = ""
    failed: bool = False
    first_seconds: float | None = None
    blocked: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def as_json(self, floor: Row | None) -> dict[str, Any]:
        """With medians over the rounds."""
        seconds = statistics.median(self.rounds) if self.rounds else None
        # Within a round, as all paths of it shared whatever else the machine did.
        shares = [least / own for least, own in zip(floor.rounds, self.rounds, strict=False)] if floor else []
        return {
            "path": self.path,
            "verb": self.verb,
            "nbytes": self.nbytes,
            "gb_per_second": self.nbytes / seconds / 1e9 if seconds else None,
            "of_floor": statistics.median(shares) if shares else None,
            "seconds": seconds,
            "host_blocked_seconds": statistics.median(self.blocked) if self.blocked else None,
            "first_seconds": self.first_seconds,
            "rounds": self.rounds,
            "failed": self.failed,
            "note": self.note,
        }


class Bench:
    """All paths over one model, and what has been measured of them."""

    def __init__(self, size: Size, device: torch.device, results: Path, end: float) -> None:
        self._size, self._device, self._results, self._end = size, device, results, end
        self._rows: dict[str, Row] = {}
        self._mark = 0
        self._open: list[CopyPath] = []
        self._floor: Floor | None = None
        self._model = Bf16Weights(size.sizes, device)
        self._live = self._model.tensors()
        self._reference = [tensor.clone() for tensor in self._live]
        self._synchronize()

    def run(self, rounds: int) -> bool:
        """Everything; whether every path worked."""
        self._try("floor", self._open_floor)
        paths: list[CopyPath] = [
            Shardsnap(self._model, self._device),
            SlimeStyle(self._live, self._device),
            DcpStager(self._live, self._device),
            VerlStyle(self._live, self._device),
        ]
        for path in paths:
            if self._left() > 0:
                self._try(path.name, lambda path=path: self._first(path))  # type: ignore[misc]
        self._reference = []
        longest = 0.0
        done = 0
        while done < rounds and self._left() > longest:
            started = time.monotonic()
            self._round()
            done += 1
            longest = max(longest, time.monotonic() - started)
            self._save()
            print(f"{PROGRESS}round {done} of {rounds} took {longest:.1f} s at most", flush=True)
        for path in self._open:
            self._try(path.name, path.close)
        return done > 0 and len(self._open) == len(paths) and not any(row.failed for row in self._rows.values())

    def _open_floor(self) -> None:
        floor = Floor(self._size.nbytes, self._device)
        self._floor = floor
        for verb, factor in (("save", 1), ("restore", 1), ("both at once", 2)):
            self._rows[f"floor {verb}"] = Row("floor: large pinned copies", verb, factor * floor.nbytes)
            self._rows[f"floor {verb}"].first_seconds = self._time(self._floor_verbs()[verb])[1]

    def _floor_verbs(self) -> dict[str, Callable[[], Wait]]:
        assert self._floor is not None
        return {"save": self._floor.to_host, "restore": self._floor.to_device, "both at once": self._floor.both}

    def _first(self, path: CopyPath) -> None:
        """Open a path and take it once, and compare every element; one that fails is given back at once."""
        try:
            self._rehearse(path)
        except BaseException:
            with contextlib.suppress(Exception):
                path.close()
            raise
        self._open.append(path)
        self._save()

    def _rehearse(self, path: CopyPath) -> None:
        started = time.perf_counter()
        note = path.open()
        opened = time.perf_counter() - started
        for verb in ("save", "restore") if path.restores else ("save",):
            self._rows[f"{path.name} {verb}"] = Row(path.name, verb, self._size.nbytes, f"floor {verb}")
        save = self._rows[f"{path.name} save"]
        save.note = "; ".join(filter(None, [note, f"opened in {opened:.2f} s" if opened > 0.01 else ""]))
        save.first_seconds = self._time(path.save)[1]
        if (saved := path.saved()) is not None:
            check_equal([tensor.to(self._device) for tensor in saved], self._reference, path.name)
        if path.restores:
            for tensor in self._live:
                tensor.zero_()
            self._rows[f"{path.name} restore"].first_seconds = self._time(path.restore)[1]
            check_equal(self._live, self._reference, path.name)
        print(f"{PROGRESS}{path.name}: opened in {opened:.2f} s, first save {save.first_seconds:.2f} s", flush=True)

    def _round(self) -> None:
        if self._floor is not None:
            for verb, begin in self._floor_verbs().items():
                self._keep(self._rows[f"floor {verb}"], begin)
        for path in self._open:
            self._try(path.name, lambda path=path: self._once(path))  # type: ignore[misc]

    def _once(self, path: CopyPath) -> None:
        path.forget()
        self._mark = self._mark % _MARKS + 1
        stamp(self._live, float(self._mark))
        self._keep(self._rows[f"{path.name} save"], path.save)
        if (saved := path.saved()) is not None:
            check_stamp(saved, float(self._mark), path.name)
        if path.restores:
            stamp(self._live, -1.0)
            self._keep(self._rows[f"{path.name} restore"], path.restore)
            check_stamp(self._live, float(self._mark), path.name)

    def _keep(self, row: Row, begin: Callable[[], Wait]) -> None:
        blocked, seconds = self._time(begin)
        row.blocked.append(blocked)
        row.rounds.append(seconds)

    def _time(self, begin: Callable[[], Wait]) -> tuple[float, float]:
        """Seconds until the call returned, and until its bytes had arrived."""
        self._synchronize()
        started = time.perf_counter()
        wait = begin()
        returned = time.perf_counter()
        wait()
        done = time.perf_counter()
        return returned - started, done - started

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """A path that fails says so in its rows and costs no other path its figures."""
        try:
            call()
        except Exception as error:
            traceback.print_exc()
            message = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"{PROGRESS}{name}: {message}", flush=True)
            rows = [row for row in self._rows.values() if row.path == name] or [Row(name, "-", 0)]
            for row in rows:
                row.note, row.failed = message, True
                self._rows.setdefault(f"{name} {row.verb}", row)
            self._save()
            self._restart()

    def _restart(self) -> None:
        """After a failure: weights as they were, and no memory that the failed path held."""
        gc.collect()
        for tensor, reference in zip(self._live, self._reference, strict=False):
            tensor.copy_(reference)

    def _save(self) -> None:
        rows = [row.as_json(self._rows.get(row.floor)) for row in self._rows.values()]
        content = {"workload": self._size.text, "nbytes": self._size.nbytes, "rows": rows}
        write_whole(self._results, json.dumps(content, indent=1))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _left(self) -> float:
        return self._end - time.monotonic()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write JSON after every step; 0 where every path worked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args(arguments)
    end = time.monotonic() + 0.9 * options.seconds
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"{PROGRESS}torch {torch.__version__} sees no CUDA device")
        return 1
    size = choose_size(options.gib, device)
    print(f"{PROGRESS}{size.text}", flush=True)
    bench = Bench(size, device, options.results, end)
    passed = bench.run(options.rounds)
    print(f"{PROGRESS}{'every path worked' if passed else 'not every path worked, or there was no time'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
