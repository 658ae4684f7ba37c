"""The demo as its user runs it: a subprocess, its exit status, what it prints and its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardsnap.cli.app import run
from shardsnap.cli.demo.batches import mini_batch, read_text
from shardsnap.cli.demo.ranks import RankFailedError, run_ranks
from shardsnap.cli.demo.settings import Dtype, Model, Settings, Wrapper

VERBS = {"save pi_old": 1, "save live": 2, "restore pi_old": 2, "restore live": 2}  # calls a cycle, of 3 mini-batches
TINY = ("--layers", "1", "--hidden-size", "64", "--cycles", "2", "--mini-batches", "3", "--device", "cpu")


def shardsnap(*arguments: str, blocked: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command line; `blocked` is a package that it must not find."""
    command = [sys.executable, "-m", "shardsnap"]
    if blocked:
        run = "import runpy; runpy.run_module('shardsnap', run_name='__main__', alter_sys=True)"
        command = [sys.executable, "-c", f"import sys; sys.modules[{blocked!r}] = None; {run}"]
    # One thread a rank: tiny tensors gain nothing from more, and lose much where cores are shared.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, env=environment)


def check_wrapper(figures: dict[str, Any], ranks: int) -> None:
    assert figures["bit_exact"] is True
    assert figures["differences"] == {"verl-style": [], "shardsnap": []}
    assert figures["mini_batches"] == 6
    assert figures["moved"] == 4  # all but the first of each cycle: the comparison was not of equal weights anyway
    assert figures["compared"] > 6
    assert figures["parameters"] % ranks == 0
    for way in ("verl-style", "shardsnap"):
        verbs = figures["ways"][way]
        assert {name: verb["calls_per_cycle"] for name, verb in verbs.items()} == VERBS
        for verb in verbs.values():
            # Every size of the model divides by the ranks and by FSDP1's alignment: no padding, equal shards.
            assert verb["nbytes"] == figures["parameters"] // ranks * 4
            assert verb["calls"] == 2 * verb["calls_per_cycle"]
            assert verb["gb_per_s"] == pytest.approx(verb["nbytes"] / verb["seconds"] / 1e9)
        total = sum(verb["seconds"] * verb["calls_per_cycle"] for verb in verbs.values())
        assert figures["seconds_per_cycle"][way] == pytest.approx(total)


def test_all_wrappers_give_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    done = shardsnap("demo", *TINY, "--json", str(path))
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    assert figures["bit_exact"] is True
    assert figures["environment"]["torch"] == torch.__version__
    assert [found["wrapper"] for found in figures["wrappers"]] == ["fsdp1", "fsdp1-flat", "fsdp2"]
    for found in figures["wrappers"]:
        check_wrapper(found, ranks=2)
    assert "DIFFERENT" not in done.stdout
    assert done.stdout.count("equal     shardsnap and reference") == 3
    for verb in VERBS:
        assert done.stdout.count(verb) == 3
    assert "CPU" in done.stdout
    assert "…" not in done.stdout  # nothing is cut off at 80 columns


def test_llama_in_bf16_on_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    options = ("--model", "llama", "--dtype", "bf16", "--ranks", "1", "--wrapper", "fsdp1", "--wrapper", "fsdp2")
    done = shardsnap("demo", *TINY, *options, "--json", str(path))
    assert done.returncode == 0, done.stderr
    for found in json.loads(path.read_text())["wrappers"]:
        check_wrapper(found, ranks=1)


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    done = shardsnap("demo", *TINY, "--cycles", "1", "--inject-difference", "--json", str(path))
    assert done.returncode == 1, done.stderr
    all_figures = json.loads(path.read_text())
    assert all_figures["bit_exact"] is False
    assert len(all_figures["wrappers"]) == 3
    for figures in all_figures["wrappers"]:
        assert figures["bit_exact"] is False
        assert "model.embed_tokens.weight" in figures["differences"]["shardsnap"]
        assert figures["differences"]["verl-style"] == []
    assert done.stdout.count("DIFFERENT shardsnap and reference") == 3
    assert done.stdout.count("model.embed_tokens.weight") == 3
    assert "NOT equal" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--wrapper", "fsdp3"), "fsdp3"),
        (("--mini-batches", "1"), "--mini-batches"),
        (("--hidden-size", "100"), "--hidden-size"),
        (("--no-such-option",), "--no-such-option"),
        (("--json", "/no/such/directory/demo.json"), "/no/such/directory"),
        (("--device", "cuda", "--ranks", "999"), "999 CUDA GPUs"),
    ],
)
def test_a_bad_option_is_one_line(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardsnap", "demo", *options])
    status = run()
    check_one_line(status, *capsys.readouterr(), said)


def test_the_status_reaches_the_shell() -> None:
    done = shardsnap("demo", "--cycles", "0")
    check_one_line(done.returncode, done.stdout, done.stderr, "--cycles")


@pytest.mark.parametrize(
    ("package", "said"),
    [("typer", '"shardsnap[cli]"'), ("transformers", '"shardsnap[demo]"')],
)
def test_a_missing_package_is_one_line(package: str, said: str) -> None:
    done = shardsnap("demo", blocked=package)
    check_one_line(done.returncode, done.stdout, done.stderr, said)


def check_one_line(status: int, printed: str, complained: str, said: str) -> None:
    assert status == 2
    assert printed == ""
    assert len(complained.splitlines()) == 1, complained
    assert said in complained


def fail_on_rank_1(_device: torch.device, _send: Any) -> None:
    if dist.get_rank() == 1:
        raise KeyError("on purpose")
    time.sleep(600)


def die_on_rank_0(_device: torch.device, _send: Any) -> None:
    if dist.get_rank() == 0:
        sys.exit(7)
    dist.barrier()


def test_a_failing_rank_ends_all_and_shows_its_traceback() -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed.*in fail_on_rank_1.*KeyError: 'on purpose'"):
        list(run_ranks(2, "cpu", fail_on_rank_1))


def test_a_rank_that_ends_early_ends_all() -> None:
    with pytest.raises(RankFailedError, match="failed"):
        list(run_ranks(2, "cpu", die_on_rank_0))


def test_mini_batches_are_the_text_in_order() -> None:
    text = read_text()
    assert text.startswith(b"Alice was beginning")
    settings = Settings(2, "cpu", tuple(Wrapper), Model.QWEN3, 1, 64, Dtype.FP32, 1, 2)
    size = settings.sequences * settings.sequence_bytes
    taken = b""
    for index in range(len(text) // size):
        for rank in range(2):
            batch = mini_batch(text, settings, index, rank, torch.device("cpu"))
            assert batch.tokens.shape == (settings.sequences, settings.sequence_bytes)
            assert batch.advantages.shape == (settings.sequences, settings.sequence_bytes - 1)
            assert abs(float(batch.advantages.mean())) < 1e-5
            taken += bytes(batch.tokens.flatten().tolist())
    assert taken == (text * 2)[: len(taken)]
