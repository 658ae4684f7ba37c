"""The typer app: which commands there are, and how their errors become one line and an exit status.

A command is a function in a module of its own; it returns nothing, or raises typer.Exit with its status.
"""

from __future__ import annotations

import sys

import typer

from shardsnap.cli.demo.command import demo
from shardsnap.cli.errors import CommandError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)

# Its base covers every kind of bad option; newer typers bring their own click, so that click's name is no help.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@app.callback()
def commands() -> None:
    """Keep versions of a live model's weights in host memory, and put any of them back in place."""


def run() -> int:
    """Run the command that ``sys.argv`` asks for.

    Returns:
        The exit status: what the command gave, 2 for bad options, 130 after Ctrl-C.
    """
    try:
        return app(standalone_mode=False) or 0
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        print(f"shardsnap: {message} (--help lists what there is)", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"shardsnap: {error}", file=sys.stderr)
        return error.status
    except (typer.Abort, KeyboardInterrupt):
        print("shardsnap: interrupted", file=sys.stderr)
        return 130
