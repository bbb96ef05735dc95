"""`gemmcache build`: from records to a published bundle, with no GPU."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from gemmcache.cli.options import existing_records_option, target_of
from gemmcache.cli.output import json_option, print_json, print_table
from gemmcache.cli.progress import progress
from gemmcache.cli.source import source_options, workload_of
from gemmcache.errors import UsageError
from gemmcache.target import TARGETS

if TYPE_CHECKING:
    from gemmcache.build.builder import Built
    from gemmcache.build.plan import TargetPlan


@click.command("build")
@source_options
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=("native",),
    metavar="NAME",
    help=f"GPU to build for: {', '.join(TARGETS)}, or native (the GPU of this machine; the default). May be repeated.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder of the bundle.")
@click.option("--name", metavar="NAME", help="Name of the bundle; the source's name by default.")
@click.option("--require-tuned", is_flag=True, help="Refuse to predict what has no tuning record.")
@click.option(
    "--untuned",
    type=click.Choice(["predict", "library"]),
    default="predict",
    show_default=True,
    help="What serves problems without a tuning record: the kernel that the models predict, or cuBLAS.",
)
@existing_records_option
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compiler processes; one a CPU by default.")
@json_option
def command(
    source: str,
    fuse: bool,
    tp: int,
    dtype: str | None,
    epilogues: str,
    ms: tuple[int, ...] | None,
    targets: tuple[str, ...],
    out: Path,
    name: str | None,
    require_tuned: bool,
    untuned: str,
    folder: Path | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Compile the winners for SOURCE into a bundle in DIR.

    SOURCE is a Hugging Face config.json, a trace folder, a list of problems, or the name of a shipped model config.
    Problems without a tuning record for the target are predicted, from tuned neighbours or by the cost model, and
    marked so: a prediction can be slower than cuBLAS. A bundle that is in
    DIR already is replaced at once, or left as it was if anything fails.
    """
    from gemmcache.build.builder import build
    from gemmcache.build.objects import ObjectCache
    from gemmcache.build.plan import Planner
    from gemmcache.bundle.interface import KERNEL, PREDICTED
    from gemmcache.kernels.identity import detect_toolchain
    from gemmcache.kernels.registry import kernel_families
    from gemmcache.paths import cache_dir
    from gemmcache.records.layers import Records
    from gemmcache.target import detect_host

    started = perf_counter()
    chosen = [target_of(t) for t in targets]
    if len({(t.arch, t.product, t.sm_count) for t in chosen}) != len(chosen):
        raise UsageError("a target is named twice")
    workload = workload_of(source, fuse, tp, dtype, epilogues)
    families, host = kernel_families(), detect_host()
    toolchain = detect_toolchain(families.values())
    with Records.open(folder, read_only=True) as layers:
        planner = Planner(layers, families, toolchain, host)
        plans = [planner.plan(workload, t, ms=ms, require_tuned=require_tuned, untuned=untuned) for t in chosen]
    total = len({d for p in plans for d in p.specs})
    with progress("compiling", total) as ticker:
        built = build(
            name or workload.name,
            plans,
            out,
            toolchain=toolchain,
            host=host,
            cache=ObjectCache(cache_dir() / "objects"),
            jobs=jobs,
            progress=lambda digest, cached: ticker.advance(),
        )
    seconds = perf_counter() - started
    guesses = sum(e.origin == PREDICTED and e.choice == KERNEL for p in plans for e in p.entries)
    if guesses:
        click.echo(
            f"gemmcache: {guesses} entries have no tuning record: their kernels are predictions, which can be slower "
            "than cuBLAS\n  try: tune them, or build with --untuned library",
            err=True,
        )
    if as_json:
        print_json(_summary(built, plans, seconds))
    else:
        _show(built, plans, seconds)
    return 0


def _summary(built: Built, plans: list[TargetPlan], seconds: float) -> dict[str, Any]:
    from gemmcache.build.plan import speedup

    return {
        "bundle": str(built.folder),
        "digest": built.digest,
        "name": built.manifest.name,
        "version": built.manifest.version,
        "blob_bytes": built.blob_bytes,
        "compiled": built.compiled,
        "cached": built.cached,
        "seconds": round(seconds, 3),
        "targets": [{"target": p.target.to_value(), **p.counts(), "speedup": speedup(p.entries)} for p in plans],
    }


def _show(built: Built, plans: list[TargetPlan], seconds: float) -> None:
    from gemmcache.build.plan import speedup
    from gemmcache.bundle.interface import KERNEL, PREDICTED

    for plan in plans:
        rows = []
        for table in sorted(plan.tables, key=lambda t: (-t.count, t.family.n, t.family.k)):
            entries = table.entries
            gain = speedup(entries)
            rows.append(
                (
                    table.family,
                    table.count,
                    f"{entries[0].m}..{entries[-1].m}",
                    len(entries),
                    sum(e.choice == KERNEL for e in entries),
                    sum(e.choice != KERNEL for e in entries),
                    sum(e.origin == PREDICTED for e in entries),
                    len({e.kernel for e in entries if e.kernel}),
                    f"{gain:.3f}" if gain else "-",
                )
            )
        print_table(
            str(plan.target),
            ("N x K", "count", "m", "entries", "kernel", "library", "predicted", "unique kernels", "x library"),
            rows,
            right=range(1, 9),
        )
        counts, gain = plan.counts(), speedup(plan.entries)
        click.echo(
            f"{counts['entries']} entries: {counts['kernel_entries']} served by {counts['unique_kernels']} unique "
            f"kernels, {counts['library_entries']} by the library; {counts['predicted_entries']} predicted; "
            + (f"geometric mean over tuned entries {gain:.3f} x library" if gain else "nothing tuned")
        )
        click.echo()
    click.echo(
        f"{built.folder}: version {built.manifest.version}, {built.blob_bytes / 1e6:.2f} MB, "
        f"{built.compiled} compiled, {built.cached} from the object cache, {seconds:.1f} s"
    )
    click.echo(f"sha256 {built.digest}")
