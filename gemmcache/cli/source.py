"""The SOURCE argument and its options, the same for every command that starts from problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gemmcache.errors import UsageError
from gemmcache.ladder import parse_ms
from gemmcache.models.interface import EPILOGUES, PLAIN, Workload

F = TypeVar("F", bound=Callable[..., Any])


def _ms(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return parse_ms(value)
    except UsageError as error:
        raise UsageError(f"--m: {error.message}", remedy=error.remedy) from error


def source_options(function: F) -> F:
    """Adds SOURCE and its options; see `_source_options`."""
    return _source_options(function, required=True)


def optional_source_options(function: F) -> F:
    """`source_options` of a command that can do without SOURCE, which is None then."""
    return _source_options(function, required=False)


def _source_options(function: F, required: bool) -> F:
    """Adds SOURCE, `--fuse`, `--tp`, `--dtype`, `--epilogues` and `--m`: parameters `source: str`, `fuse: bool`,
    `tp: int`, `dtype: str | None`, `epilogues: str` (of `models.interface.EPILOGUES`) and
    `ms: tuple[int, ...] | None` (ascending, None for the source's own)."""
    for decorate in reversed(
        (
            click.argument("source", required=required),
            click.option(
                "--fuse",
                is_flag=True,
                help="Merge q/k/v and gate/up projections into one GEMM, as serving engines do.",
            ),
            click.option(
                "--tp",
                type=click.IntRange(min=1),
                default=1,
                show_default=True,
                metavar="RANKS",
                help="Ranks of tensor parallelism; shapes are one rank's.",
            ),
            click.option("--dtype", metavar="NAME", help="Operands' dtype instead of the source's own, e.g. bf16."),
            click.option(
                "--epilogues",
                type=click.Choice(EPILOGUES),
                default=PLAIN,
                show_default=True,
                help="Epilogues of a model's layers: bias only, those that `shapes` shows as fusable, or both, "
                "each layer plain and fused.",
            ),
            click.option(
                "--m",
                "ms",
                callback=_ms,
                metavar="MS",
                help="Rows to tune at instead of the source's own: 1,16,256 or 1..8192 (powers of two).",
            ),
        )
    ):
        function = decorate(function)
    return function


def workload_of(
    source: str, fuse: bool, tp: int, dtype: str | None, epilogues: str = PLAIN, *, notes: bool = False
) -> Workload:
    """The workload of SOURCE with these options; errors as `models.source.load_workload`.

    Its notes on proposed epilogues go to stderr where these are used, or always with `notes`.
    """
    from gemmcache.models.source import load_workload

    workload = load_workload(source, dtype=dtype, fuse=fuse, tp=tp, epilogues=epilogues)
    if notes or epilogues != PLAIN:
        for note in workload.notes:
            click.echo(f"gemmcache: {source}: {note}", err=True)
    return workload
