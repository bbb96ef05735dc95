"""`gemmcache tune`: measure on this machine's GPU."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemmcache.cli.options import records_option
from gemmcache.cli.output import json_option, print_json, print_table
from gemmcache.cli.progress import progress
from gemmcache.cli.source import source_options, workload_of
from gemmcache.errors import EXIT_FINDINGS, UsageError

if TYPE_CHECKING:
    from gemmcache.problem import Problem
    from gemmcache.records.interface import TuningRecord
    from gemmcache.tuning.tuner import Summary


@click.command("tune")
@source_options
@records_option
@click.option("--family", "names", multiple=True, metavar="NAME", help="Kernel families to search; all by default.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="CUDA device.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compiler processes; one a CPU by default.")
@click.option("--again", is_flag=True, help="Measure problems again that have a record of this environment.")
@json_option
def command(
    source: str,
    fuse: bool,
    tp: int,
    dtype: str | None,
    epilogues: str,
    ms: tuple[int, ...] | None,
    folder: Path | None,
    names: tuple[str, ...],
    device: int,
    jobs: int | None,
    again: bool,
    as_json: bool,
) -> int:
    """Measure every problem of SOURCE on this machine's GPU and record the winners.

    Every valid config of every kernel family is timed against cuBLAS and its numbers are checked. Each record is
    stored as soon as it is measured: interrupt at any time, the next run goes on from there.
    """
    from gemmcache.build.objects import ObjectCache
    from gemmcache.kernels.identity import detect_toolchain
    from gemmcache.kernels.registry import kernel_families
    from gemmcache.paths import cache_dir
    from gemmcache.records.interface import MeasurementPolicy
    from gemmcache.records.layers import Records
    from gemmcache.target import detect_host
    from gemmcache.tuning.executor import WorkerExecutor
    from gemmcache.tuning.tuner import Tuner

    installed = kernel_families()
    unknown = [n for n in names if n not in installed]
    if unknown:
        raise UsageError(f"kernel family '{unknown[0]}' is not installed", remedy=f"installed: {', '.join(installed)}")
    families = [f for n, f in installed.items() if not names or n in names]
    # Only those that are searched: what a part of the families won is no record of all of them.
    toolchain = detect_toolchain(families)
    workload = workload_of(source, fuse, tp, dtype, epilogues)
    # By family, so that a family's weights are made once; families in order of their weight.
    weights = workload.problems(ms)
    heavy = {family: -count for family, count in workload.families().items()}
    problems = sorted(weights, key=lambda p: (heavy[p.family], str(p.family), p.m))
    with (
        tempfile.TemporaryDirectory(prefix="gemmcache-tune-") as scratch,
        WorkerExecutor(device, toolchain) as executor,
        Records.open(folder) as store,
    ):
        tuner = Tuner(
            executor,
            store,
            families,
            MeasurementPolicy(),
            ObjectCache(cache_dir() / "objects"),
            toolchain,
            detect_host(),
            Path(scratch),
            jobs,
        )
        target = executor.environment.target
        with progress("compiling") as ticker:
            for family in dict.fromkeys(p.family for p in tuner.pending(problems, again)):
                tuner.candidates(family, target, progress=lambda digest, cached: ticker.advance())
        with progress("tuning", len(problems)) as ticker:

            def show(problem: Problem, record: TuningRecord | None, note: str) -> None:
                if record is None:
                    click.echo(f"gemmcache: {problem}: {note}", err=True)
                ticker.advance(f"{problem}: {note if record is None else f'{record.speedup:.2f} x library'}")

            summary = tuner.tune(problems, again=again, progress=show)
    if as_json:
        print_json(_values(summary))
    else:
        _show(summary)
    return EXIT_FINDINGS if summary.failed else 0


def _values(summary: Summary) -> dict[str, object]:
    return {
        "tuned": [_row(r) for r in summary.tuned],
        "kept": [_row(r) for r in summary.kept],
        "failed": [{"problem": str(p), "reason": reason} for p, reason in summary.failed.items()],
    }


def _row(record: TuningRecord) -> dict[str, object]:
    winner = record.winner
    return {
        "problem": str(record.problem),
        "digest": record.digest,
        "choice": record.choice,
        "config": str(winner.config) if winner else None,
        "us": winner.us if winner else record.library_us,
        "library_us": record.library_us,
        "speedup": record.speedup,
    }


def _show(summary: Summary) -> None:
    from statistics import geometric_mean

    records = summary.tuned + summary.kept
    rows = []
    for record in records:
        problem, us = record.problem, record.winner.us if record.winner else record.library_us
        rows.append(
            (
                problem.m,
                problem.family,
                f"{us:.2f}",
                f"{problem.flops / us / 1e6:.0f}",
                f"{problem.min_bytes / us / 1e3:.0f}",
                f"{record.speedup:.3f}",
                record.winner.config if record.winner else "library",
            )
        )
    print_table("", ("m", "N x K", "us", "TFLOP/s", "GB/s", "x library", "choice"), rows, right=(0, 2, 3, 4, 5))
    if records:
        won = sum(r.winner is not None for r in records)
        click.echo(
            f"{len(summary.tuned)} tuned, {len(summary.kept)} kept, {len(summary.failed)} failed; kernels win {won} of "
            f"{len(records)}; geometric mean of best / library {geometric_mean(r.speedup for r in records):.3f}"
        )
    for problem, reason in summary.failed.items():
        click.echo(f"failed: {problem}: {reason}", file=sys.stderr)
