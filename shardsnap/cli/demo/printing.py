"""Tables and checks, as a person reads them."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from shardsnap.cli.demo.results import WAYS, Environment, WrapperResult
from shardsnap.cli.demo.settings import Settings, Wrapper
from shardsnap.sizes import format_size

_NAMES_SHOWN = 4

_LINK = {
    "cpu": (
        "The model is on the CPU, so the link between it and the snapshots is memory itself: both ways copy memory to "
        "memory, and nothing needs to be pinned. The figures show fresh pageable memory at every save against memory "
        "that is kept, and copies by one or by several threads. On GPUs the link is PCIe or NVLink-C2C, which pageable "
        "memory cannot fill: figures from there are other figures, and say more."
    ),
    "cuda": (
        "The link is the one between GPU and host (PCIe or NVLink-C2C). Each time runs until the bytes have arrived; a "
        "trainer need not wait for shardsnap's saves, which the call starts and does not wait for."
    ),
}


def print_environment(console: Console, environment: Environment, settings: Settings) -> None:
    """Print what the figures below come from."""
    console.print(
        f"torch {environment.torch}, {settings.ranks} ranks, {environment.device}, {settings.dtype.value}; "
        f"{settings.model.value}, {settings.layers} layers of {settings.hidden_size}; "
        f"{settings.cycles} cycles of {settings.mini_batches} mini-batches"
    )
    console.print(
        f"copies, per rank: verl-style by torch ({environment.torch_threads} threads), "
        f"shardsnap by {environment.copy_device}"
    )
    console.print(_LINK[settings.device_type])


def print_wrapper(console: Console, result: WrapperResult) -> None:
    """Print the times of both ways and what the comparison with the reference gave."""
    table = Table(
        title=f"{Wrapper(result.wrapper).label}: {result.parameters / 1e6:.1f} M weights",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_footer=True,
    )
    verl_total, total = (result.seconds_per_cycle(way) for way in WAYS)
    table.add_column("\nverb", footer="one cycle", no_wrap=True)
    table.add_column("\ncalls", justify="right")
    table.add_column("a rank\nmoves", justify="right", no_wrap=True)
    table.add_column("verl-style\nms", justify="right", footer=f"{verl_total * 1e3:.2f}")
    table.add_column("\nGB/s", justify="right")
    table.add_column("shardsnap\nms", justify="right", footer=f"{total * 1e3:.2f}")
    table.add_column("\nGB/s", justify="right")
    table.add_column("\nratio", justify="right", footer=f"{verl_total / total:.2f}")
    for verb, verl in result.ways["verl-style"].items():
        ours = result.ways["shardsnap"][verb]
        moved = dict.fromkeys(format_size(nbytes) for nbytes in (verl.nbytes, ours.nbytes))
        table.add_row(
            verb,
            str(verl.calls_per_cycle),
            " / ".join(moved),
            f"{verl.seconds * 1e3:.2f}",
            f"{verl.gb_per_s:.2f}",
            f"{ours.seconds * 1e3:.2f}",
            f"{ours.gb_per_s:.2f}",
            f"{verl.seconds / ours.seconds:.2f}",
        )
    console.print()
    console.print(table)
    console.print(
        f"calls per cycle; ms: median of all calls, slowest rank, collective parts included. "
        f"Ahead of them, once: {result.open_seconds * 1e3:.0f} ms to construct the SnapshotService."
    )
    console.print(
        f"live weights no longer gave old_log_prob in {result.moved} of {result.mini_batches} mini-batches, "
        "so that pi_old was needed there"
    )
    for way, names in result.differences.items():
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            console.print(f"DIFFERENT {way} and reference: {len(names)} of {result.compared} tensors: {shown}")
        else:
            console.print(
                f"equal     {way} and reference: {result.mini_batches} old_log_probs and "
                f"{result.compared - result.mini_batches} weights on every rank, bit for bit"
            )
