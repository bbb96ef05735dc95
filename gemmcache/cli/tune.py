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
from gemmcache.cli.source import optional_source_options, workload_of
from gemmcache.errors import EXIT_FINDINGS, UsageError
from gemmcache.models.interface import PLAIN
from gemmcache.tuning.candidates import CompiledCandidates
from gemmcache.tuning.pack import PackedCandidates

if TYPE_CHECKING:
    from gemmcache.environment import Toolchain
    from gemmcache.problem import Problem
    from gemmcache.records.interface import TuningRecord
    from gemmcache.tuning.tuner import Summary


@click.command("tune")
@optional_source_options
@click.option(
    "--pack",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Measure the candidates and problems that `gemmcache pack` wrote, instead of SOURCE's; compiles nothing.",
)
@records_option
@click.option("--family", "names", multiple=True, metavar="NAME", help="Kernel families to search; all by default.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="CUDA device.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compiler processes; one a CPU by default.")
@click.option("--again", is_flag=True, help="Measure problems again that have a record of this environment.")
@json_option
def command(
    source: str | None,
    fuse: bool,
    tp: int,
    dtype: str | None,
    epilogues: str,
    ms: tuple[int, ...] | None,
    pack: Path | None,
    folder: Path | None,
    names: tuple[str, ...],
    device: int,
    jobs: int | None,
    again: bool,
    as_json: bool,
) -> int:
    """Measure every problem of SOURCE, or of a tuning pack, on this machine's GPU and record the winners.

    Every valid config of every kernel family is timed against cuBLAS and its numbers are checked. Each record is
    stored as soon as it is measured: interrupt at any time, the next run goes on from there.
    """
    from gemmcache.environment import package_version
    from gemmcache.records.interface import MeasurementPolicy
    from gemmcache.records.layers import Records
    from gemmcache.target import detect_host
    from gemmcache.tuning.executor import WorkerExecutor
    from gemmcache.tuning.tuner import Tuner

    if (source is None) == (pack is None):
        raise UsageError("tune takes SOURCE or --pack, one of them", remedy="gemmcache tune config.json")
    if pack is not None and (fuse, tp, dtype, epilogues, names, jobs) != (False, 1, None, PLAIN, (), None):
        raise UsageError("a pack was made with its options", remedy="give them to gemmcache pack; --m selects here")
    with tempfile.TemporaryDirectory(prefix="gemmcache-tune-") as scratch:
        candidates: CompiledCandidates | PackedCandidates
        if pack is not None:
            candidates, toolchain, problems = _packed(pack, Path(scratch), ms)
        else:
            workload = workload_of(str(source), fuse, tp, dtype, epilogues)
            problems = workload.in_tuning_order(ms)
            candidates, toolchain = _compiled(names, Path(scratch), jobs)
        with WorkerExecutor(device, toolchain) as executor, Records.open(folder) as store:
            target = executor.environment.target
            if isinstance(candidates, PackedCandidates):
                candidates.pack.check_runs_on(target, detect_host(), package_version("apache-tvm-ffi"))
            tuner = Tuner(executor, store, candidates, MeasurementPolicy())
            with progress("unpacking" if pack else "compiling") as ticker:
                for family in dict.fromkeys(p.family for p in tuner.pending(problems, again)):
                    candidates.candidates(family, target, progress=lambda digest, cached: ticker.advance())
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


def _compiled(names: tuple[str, ...], scratch: Path, jobs: int | None) -> tuple[CompiledCandidates, Toolchain]:
    from gemmcache.build.objects import ObjectCache
    from gemmcache.kernels.identity import detect_toolchain
    from gemmcache.kernels.registry import chosen_families
    from gemmcache.paths import cache_dir
    from gemmcache.target import detect_host

    families = chosen_families(names)
    # Only those that are searched: what a part of the families won is no record of all of them.
    toolchain = detect_toolchain(families)
    cache = ObjectCache(cache_dir() / "objects")
    return CompiledCandidates(families, cache, toolchain, detect_host(), scratch, jobs), toolchain


def _packed(path: Path, scratch: Path, ms: tuple[int, ...] | None) -> tuple[PackedCandidates, Toolchain, list[Problem]]:
    packed = PackedCandidates(path, scratch)
    problems = [p for p in packed.pack.problems if ms is None or p.m in ms]
    if not problems:
        raise UsageError(f"{path} has no problem at these ms", remedy="leave --m out, or pack again")
    return packed, packed.pack.toolchain, problems


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
