"""The command group: lazy commands, and the one place where errors become exit codes."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

import click

from gemmcache._version import __version__
from gemmcache.errors import EXIT_INTERRUPT, EXIT_TOOL, EXIT_USAGE, GemmcacheError, StorageError

#: command -> one line of help. The command's function is `command` in module `gemmcache.cli.<name>`.
COMMANDS: dict[str, str] = {
    "shapes": "List the GEMMs of a model config, a trace or a list.",
    "tune": "Measure kernels on this machine's GPU and record the winners.",
    "pack": "Compile candidates for a GPU machine that has no compiler.",
    "records": "List, show, exchange and remove tuning records.",
    "build": "Compile the winners for a model into a bundle; needs no GPU.",
    "inspect": "Show what is in a bundle.",
    "verify": "Check every byte of a bundle against its digests.",
}


class LazyGroup(click.Group):
    """Imports a command's module when the command is asked for, so that each starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"gemmcache.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"gemmcache.cli.{cmd_name}.command is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gemmcache")
def cli() -> None:
    """Tune GEMMs once, compile the winners ahead of time, serve them from a verified bundle.

    Exit codes: 0 ok, 1 findings, 2 usage, 3 integrity, 4 incompatible, 5 tool or GPU failure, 130 interrupt.
    """


def run(args: list[str]) -> int:
    """Runs the command line on `args` and returns its exit code. Data goes to stdout, the rest to stderr."""
    try:
        result = cli.main(args=args, prog_name="gemmcache", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.Abort:
        click.echo("gemmcache: interrupted", err=True)
        return EXIT_INTERRUPT
    except click.ClickException as error:
        error.show(sys.stderr)
        return EXIT_USAGE
    except GemmcacheError as error:
        _report(error, as_json="--json" in args)
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout went away (`| head`); what the interpreter flushes at exit must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_TOOL
    except OSError as error:
        _report(StorageError(f"{error.filename or 'output'}: {error.strerror or error}"), as_json=False)
        return EXIT_TOOL
    return result if isinstance(result, int) else 0


def _report(error: GemmcacheError, as_json: bool) -> None:
    if as_json:
        body = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
        click.echo(json.dumps({"error": body}, sort_keys=True))
    click.echo(f"gemmcache: {error.message}", err=True)
    if error.remedy:
        click.echo(f"  try: {error.remedy}", err=True)
