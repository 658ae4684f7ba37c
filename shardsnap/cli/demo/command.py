"""``python -m shardsnap demo``: the options, and the exit status."""

from __future__ import annotations

import dataclasses
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Optional

import torch
import typer
from rich.console import Console

from shardsnap.cli.demo.comparison import compare_wrappers
from shardsnap.cli.demo.printing import print_environment, print_wrapper
from shardsnap.cli.demo.ranks import RankFailedError, run_ranks
from shardsnap.cli.demo.results import Environment, WrapperResult
from shardsnap.cli.demo.settings import Dtype, Model, Settings, Wrapper
from shardsnap.cli.errors import CommandError

_RANK_FAILED = 3


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Processes; with CUDA, one GPU each.")] = 2,
    wrapper: Annotated[
        Optional[list[Wrapper]], typer.Option(help="How the model is sharded; may be repeated. Default: all.")  # noqa: UP045 - typer reads it on Python 3.10
    ] = None,
    model: Annotated[Model, typer.Option(help="Architecture, with random weights.")] = Model.QWEN3,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    hidden_size: Annotated[int, typer.Option(min=64, help="Width, a multiple of 64.")] = 512,
    dtype: Annotated[Dtype, typer.Option(help="Compute precision; weights are kept in fp32.")] = Dtype.FP32,
    cycles: Annotated[int, typer.Option(min=1, help="Parameter-sync cycles.")] = 2,
    mini_batches: Annotated[int, typer.Option(min=2, help="Optimizer steps per cycle.")] = 4,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where every rank gets a GPU.")] = "auto",
    json_path: Annotated[
        Optional[Path], typer.Option("--json", dir_okay=False, help="Write the figures to this file too.")  # noqa: UP045
    ] = None,
    inject_difference: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Decoupled PPO's old_log_prob cycle on a small model: verl-style copies, shardsnap, and a reference.

    Trains the same model three times. In every mini-batch of a cycle but the
    first, old_log_prob is computed with the weights that began the cycle:
    through copies to pageable CPU memory as verl's helpers make them, through
    shardsnap, and through a second model. Compares all results bit for bit and
    prints what each verb took.

    Exit status: 0 all equal, 1 something differs, 2 a bad option or a missing
    package, 3 a rank failed.
    """
    started = time.perf_counter()
    if find_spec("transformers") is None:
        raise CommandError('the demo needs transformers: pip install "shardsnap[demo]"')
    if hidden_size % 64:
        raise typer.BadParameter(f"{hidden_size} is not a multiple of 64", param_hint="--hidden-size")
    if json_path is not None and not json_path.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {json_path.parent}", param_hint="--json")
    settings = Settings(
        ranks=ranks,
        device_type=_device_type(device, ranks),
        wrappers=tuple(dict.fromkeys(wrapper or Wrapper)),
        model=model,
        layers=layers,
        hidden_size=hidden_size,
        dtype=dtype,
        cycles=cycles,
        mini_batches=mini_batches,
        inject_difference=inject_difference,
    )

    console = Console(highlight=False)
    environment, results = _run(console, settings)
    bit_exact = all(result.bit_exact for result in results)
    seconds = time.perf_counter() - started
    if json_path is not None:
        _write_json(json_path, settings, environment, results, seconds)
    console.print()
    console.print(f"{'all equal' if bit_exact else 'NOT equal'}, bit for bit, in {seconds:.0f} s")
    raise typer.Exit(0 if bit_exact else 1)


def _run(console: Console, settings: Settings) -> tuple[Environment, list[WrapperResult]]:
    results: list[WrapperResult] = []
    try:
        for environment, result in run_ranks(settings.ranks, settings.device_type, compare_wrappers, settings):
            if not results:
                print_environment(console, environment, settings)
            print_wrapper(console, result)
            results.append(result)
    except RankFailedError as error:
        raise CommandError(str(error), status=_RANK_FAILED) from None
    return environment, results


def _device_type(device: str, ranks: int) -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is none of auto, cpu, cuda", param_hint="--device")
    if device == "cuda" and gpus < ranks:
        raise typer.BadParameter(f"{ranks} ranks need {ranks} CUDA GPUs, there are {gpus}", param_hint="--device")
    return "cuda" if gpus >= ranks and device != "cpu" else "cpu"


def _write_json(
    path: Path, settings: Settings, environment: Environment, results: list[WrapperResult], seconds: float
) -> None:
    figures: dict[str, Any] = {
        "environment": dataclasses.asdict(environment),
        "settings": dataclasses.asdict(settings),
        "wrappers": [result.as_json() for result in results],
        "bit_exact": all(result.bit_exact for result in results),
        "seconds": seconds,
    }
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
