"""The command line: one file a command, found by name and imported only when it runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `gemmcache` script. Ends the process with the exit codes of `gemmcache.errors`."""
    try:
        from gemmcache.cli.app import run
    except ImportError as error:
        print(f"gemmcache: the command line needs {error.name}: pip install 'gemmcache[build]'", file=sys.stderr)  # noqa: T201
        sys.exit(5)
    sys.exit(run(sys.argv[1:]))
