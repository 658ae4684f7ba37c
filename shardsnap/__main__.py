"""``python -m shardsnap``: the command line, or one line that says how to install what it needs."""

import sys


def main() -> int:
    """Run the command line on ``sys.argv`` and return its exit status."""
    try:
        from shardsnap.cli.app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(f'shardsnap: the command line needs {missing}: pip install "shardsnap[cli]"', file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
