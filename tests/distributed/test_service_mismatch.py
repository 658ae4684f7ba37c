"""Restoring into a model that has changed since: every difference by name, nothing touched, and the rest on request.

A service holds one module. What changes is what that module contains: `Holder.net` is set to another model, or a
submodule gets, loses or renames a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - its usual name

from shardsnap import LayoutMismatchError, SnapshotService
from tests.distributed import scenarios
from tests.distributed.launch import Ranks
from tests.distributed.scenarios import overwrite, shards
from tests.distributed.test_layout_fsdp1 import wrapped
from tests.distributed.test_layout_fsdp2 import Net, sharded
from tests.layout.reading import bytes_of

Change = Callable[["Holder"], None]


class Holder(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)


def add(holder: Holder) -> None:
    holder.net.blocks[0].extra = nn.Parameter(torch.ones(3))


def remove(holder: Holder) -> None:
    del holder.net.ignored


def remove_sharded(holder: Holder) -> None:
    del holder.net.gate


def rename(holder: Holder) -> None:
    holder.net.portal = holder.net.gate
    del holder.net.gate


def reshape(holder: Holder) -> None:
    holder.net.ignored = nn.Parameter(torch.ones(2, 3))
    holder.net.scale = torch.ones(7)


def convert_buffer(holder: Holder) -> None:
    holder.net.scale = holder.net.scale.double()


def many(holder: Holder) -> None:
    add(holder)
    remove(holder)
    rename(holder)
    convert_buffer(holder)


GATES = [f"gate.{name}" for name in ("weight", "bias")]
PORTALS = [f"portal.{name}" for name in ("weight", "bias")]
CHANGES: list[tuple[Change, dict[str, str], list[str]]] = [
    (add, {"blocks.0.extra": "missing"}, []),
    (remove, {"ignored": "unexpected"}, []),
    (remove_sharded, dict.fromkeys(GATES, "unexpected"), []),
    (rename, dict.fromkeys(GATES, "unexpected") | dict.fromkeys(PORTALS, "missing"), []),
    (reshape, {"ignored": "shape", "scale": "shape"}, []),
    (convert_buffer, {}, ["scale"]),
    (
        many,
        {"blocks.0.extra": "missing", "ignored": "unexpected"}
        | dict.fromkeys(GATES, "unexpected")
        | dict.fromkeys(PORTALS, "missing"),
        ["scale"],
    ),
]


def changed(change: Change, build: scenarios.Build, options: dict[str, Any]) -> dict[str, Any]:
    """Save, write, change, restore: what the strict error says and what the lenient report lists, on this rank."""
    holder = Holder(build(**options))
    with SnapshotService(holder, snapshots=2) as service:
        scenarios.output_of(holder)
        service.save("old")
        saved = shards(holder)
        overwrite(holder)
        change(holder)
        before = shards(holder)
        try:
            service.restore("old")
            error = ""
        except LayoutMismatchError as mismatch:
            error = str(mismatch)
        assert shards(holder) == before, "a refused restore has changed weights"
        scenarios.check_group_works()
        report = service.restore("old", strict=False)
        after = shards(holder)
        assert {name: address for name, (address, _) in after.items()} == {
            name: address for name, (address, _) in before.items()
        }
        service.save("new")  # and the changed model goes on
        overwrite(holder)
        assert service.restore("new").skipped == ()
        assert shards(holder) == after
        return {
            "error": error,
            "skipped": {difference.name: difference.kind for difference in report.skipped},
            "restored": list(report.restored),
            "converted": list(report.converted),
            "saved": {name: data for name, (_, data) in saved.items()},
            "before": {name: data for name, (_, data) in before.items()},
            "after": {name: data for name, (_, data) in after.items()},
        }


def named_in(error: str) -> list[str]:
    """The names in front of the differences, one a line, without the last two sentences."""
    assert error.endswith("or save the version again.")
    found = re.findall(r"^  (?:(\S+): )?(?:.+)$", error, re.MULTILINE)
    assert f"; {len(found)} difference(s):" in error.splitlines()[0]
    return found


@pytest.mark.parametrize(("change", "skipped", "converted"), CHANGES, ids=[change.__name__ for change, *_ in CHANGES])
def test_a_changed_model(run_ranks: Ranks, change: Change, skipped: dict[str, str], converted: list[str]) -> None:
    for answer in run_ranks(2, changed, change, sharded, {}):
        expected = {f"net.{name}": kind for name, kind in skipped.items()}
        assert sorted(named_in(answer["error"])) == sorted([*expected, *(f"net.{name}" for name in converted)])
        assert answer["skipped"] == expected
        assert answer["converted"] == [f"net.{name}" for name in converted]
        live = answer["after"]
        assert sorted(answer["restored"]) == sorted(name for name in live if name not in expected)
        for name in live:
            if name in expected:
                assert live[name] == answer["before"][name], name
            elif name in answer["converted"]:
                value = torch.frombuffer(bytearray(answer["saved"][name]), dtype=torch.float32)
                assert live[name] == bytes_of(value.double()), name
            else:
                assert live[name] == answer["saved"][name], name


def as_double(holder: Holder) -> None:
    holder.double()


def as_bfloat16(holder: Holder) -> None:
    holder.bfloat16()


@pytest.mark.parametrize(("change", "dtype"), [(as_double, torch.float64), (as_bfloat16, torch.bfloat16)])
def test_a_model_of_another_dtype(run_ranks: Ranks, change: Change, dtype: torch.dtype) -> None:
    for answer in run_ranks(2, changed, change, sharded, {}):
        assert answer["skipped"] == {}
        assert sorted(answer["converted"]) == sorted(f"net.{name}" for name in Net().state_dict())
        assert sorted(named_in(answer["error"])) == sorted(answer["converted"])
        assert f"saved as torch.float32, live {dtype}" in answer["error"]
        for name, data in answer["saved"].items():
            value = torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)
            assert answer["after"][name] == bytes_of(value.to(dtype)), name


def on_another_mesh(holder: Holder) -> None:
    holder.net = sharded((1, 2))


def replicated(holder: Holder) -> None:
    holder.net = sharded((2, 1))


def unsharded(holder: Holder) -> None:
    torch.manual_seed(0)
    holder.net = Net()


def unsharded_fsdp1(holder: Holder) -> None:
    holder.net = wrapped("NO_SHARD", original=True)


@pytest.mark.parametrize("change", [on_another_mesh, replicated, unsharded])
def test_another_mesh(run_ranks: Ranks, change: Change) -> None:
    kept = {"net.ignored", "net.scale"}
    for answer in run_ranks(2, changed, change, sharded, {}):
        names = {f"net.{name}" for name in Net().state_dict()}
        layout = [""] if change is unsharded else []
        assert sorted(named_in(answer["error"])) == sorted([*layout, *(names - kept)])
        assert answer["skipped"] == dict.fromkeys(names - kept, "placement")
        assert set(answer["restored"]) == kept
        for name in names:
            assert answer["after"][name] == answer["saved" if name in kept else "before"][name], name


def test_another_strategy_under_fsdp1(run_ranks: Ranks) -> None:
    options = {"strategy": "FULL_SHARD", "original": True}
    for answer in run_ranks(2, changed, unsharded_fsdp1, wrapped, options):
        kept = {"net.ignored.weight", "net.ignored.bias", "net.scale"}
        assert set(answer["restored"]) & set(answer["skipped"]) == set()
        assert kept <= set(answer["restored"])
        assert set(answer["skipped"].values()) == {"placement"}
        assert sorted(named_in(answer["error"])) == sorted(answer["skipped"])
        assert {"net.embed.weight", "net.head.weight"} <= set(answer["skipped"])


def even(original: bool) -> nn.Module:
    """Sizes that FSDP1 does not pad, with use_orig_params or without: the parts are the same."""
    torch.manual_seed(0)
    return FSDP(nn.Linear(8, 8), use_orig_params=original, device_id=torch.device("cpu"))


def other_flags(original: bool) -> tuple[str, list[str]]:
    """Saved under one use_orig_params, restored under the other: the same names and parts, another wrapper."""
    holder = Holder(even(original))
    with SnapshotService(holder, snapshots=2) as service:
        service.save("old")
        expected = scenarios.whole(even(not original))
        holder.net = even(not original)
        overwrite(holder)
        before = shards(holder)
        with pytest.raises(LayoutMismatchError) as caught:
            service.restore("old")
        assert shards(holder) == before
        report = service.restore("old", strict=False)
        assert (report.skipped, report.converted) == ((), ())
        assert scenarios.whole(holder.net) == expected
        return str(caught.value), list(report.restored)


@pytest.mark.parametrize("original", [False, True])
def test_another_use_orig_params(run_ranks: Ranks, original: bool) -> None:
    for error, restored in run_ranks(2, other_flags, original):
        assert named_in(error) == [""]
        live = f"fsdp1(use_orig_params={not original})"
        assert f"saved from fsdp1(use_orig_params={original}), the live model is {live}" in error
        assert restored == ["net.weight", "net.bias"]


def with_other_padding(holder: Holder) -> None:
    holder.net = wrapped("FULL_SHARD", original=True)


def test_another_use_orig_params_with_other_padding(run_ranks: Ranks) -> None:
    """Aligned originals move what follows them to other ranks: those parts are named, the others come back."""
    kept = {"net.ignored.weight", "net.ignored.bias", "net.scale"}
    for answer in run_ranks(2, changed, with_other_padding, wrapped, {"strategy": "FULL_SHARD", "original": False}):
        assert sorted(named_in(answer["error"])) == sorted(["", *answer["skipped"]])
        assert set(answer["skipped"].values()) == {"placement"}
        assert kept <= set(answer["restored"])
        assert not set(answer["restored"]) & set(answer["skipped"])


def apart() -> nn.Module:
    """A plain model whose head is tied to nothing."""
    net = Net()
    net.head.weight = nn.Parameter(torch.arange(66.0).reshape(11, 6))
    return net


def tie(holder: Holder) -> None:
    holder.net.head.weight = holder.net.embed.weight


def untie(holder: Holder) -> None:
    holder.net.head.weight = nn.Parameter(torch.ones(11, 6))


def test_weights_tied_since(run_ranks: Ranks) -> None:
    for answer in run_ranks(2, changed, tie, apart, {}):
        assert named_in(answer["error"]) == ["net.head.weight"]
        assert answer["skipped"] == {"net.head.weight": "tied"}
        assert answer["after"]["net.head.weight"] == answer["saved"]["net.embed.weight"]


def untied_since() -> tuple[str, ...]:
    """The snapshot holds one value for both names, and both get it: nothing differs."""
    torch.manual_seed(0)
    holder = Holder(Net())
    with SnapshotService(holder, snapshots=1) as service:
        service.save("old")
        saved = shards(holder)
        untie(holder)
        overwrite(holder)
        report = service.restore("old")
        assert scenarios.differing(shards(holder), saved) == []
        return report.restored


def test_weights_untied_since(run_ranks: Ranks) -> None:
    for names in run_ranks(2, untied_since):
        assert sorted(names) == sorted(f"net.{name}" for name in Net().state_dict())


def other_ranks_differences() -> tuple[str, bool]:
    """Every rank lacks another name: each names its own, and the note of the agreement has those of all."""
    holder = Holder(sharded())
    with SnapshotService(holder, snapshots=1) as service:
        service.save(0)
        overwrite(holder)
        name = ("ignored", "gate")[dist.get_rank()]
        delattr(holder.net, name)
        before = shards(holder)
        with pytest.raises(LayoutMismatchError) as caught:
            service.restore(0)
        notes = "".join(getattr(caught.value, "__notes__", []))
        same = shards(holder) == before
    return str(caught.value), same and "net.ignored" in notes and "net.gate.weight" in notes


def test_every_rank_has_a_difference_of_its_own(run_ranks: Ranks) -> None:
    (first, noted), (second, also_noted) = run_ranks(2, other_ranks_differences)
    assert named_in(first) == ["net.ignored"]
    assert sorted(named_in(second)) == ["net.gate.bias", "net.gate.weight"]
    assert noted
    assert also_noted


def moved_elsewhere() -> bool:
    """fully_shard over a mesh of all four ranks, then over each pair: the same names in other parts."""
    holder = Holder(sharded())
    with SnapshotService(holder, snapshots=2) as service:
        service.save("old")
        holder.net = sharded((2, 2))
        overwrite(holder)
        before = shards(holder)
        with pytest.raises(LayoutMismatchError, match=r"saved as Shard\(dim=0\) on mesh shard=4 at \(\d\)"):
            service.restore("old")
        return shards(holder) == before


def test_more_replicas_on_four_ranks(run_ranks: Ranks) -> None:
    assert run_ranks(4, moved_elsewhere) == [True] * 4
