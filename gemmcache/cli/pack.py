"""`gemmcache pack`: compile candidates on a machine without a GPU, to be measured on one without a compiler."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from gemmcache.cli.options import target_of
from gemmcache.cli.output import json_option, print_json
from gemmcache.cli.progress import progress
from gemmcache.cli.source import source_options, workload_of
from gemmcache.target import TARGETS


@click.command("pack")
@source_options
@click.option(
    "--target",
    default="native",
    metavar="NAME",
    show_default=True,
    help=f"GPU to compile for: {', '.join(TARGETS)}, or native (the GPU of this machine).",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="File of the pack.")
@click.option("--family", "names", multiple=True, metavar="NAME", help="Kernel families to search; all by default.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compiler processes; one a CPU by default.")
@json_option
def command(
    source: str,
    fuse: bool,
    tp: int,
    dtype: str | None,
    epilogues: str,
    ms: tuple[int, ...] | None,
    target: str,
    out: Path,
    names: tuple[str, ...],
    jobs: int | None,
    as_json: bool,
) -> int:
    """Compile every candidate for SOURCE into FILE, for `gemmcache tune --pack FILE` on the GPU machine.

    Needs no GPU here, and no compiler there. The GPU's time is then spent on measuring only.
    """
    from gemmcache.build.objects import ObjectCache
    from gemmcache.kernels.identity import detect_toolchain
    from gemmcache.kernels.registry import chosen_families
    from gemmcache.paths import cache_dir
    from gemmcache.target import detect_host
    from gemmcache.tuning.candidates import CompiledCandidates
    from gemmcache.tuning.pack import make_pack

    families = chosen_families(names)
    workload = workload_of(source, fuse, tp, dtype, epilogues)
    with tempfile.TemporaryDirectory(prefix="gemmcache-pack-") as scratch:
        compiled = CompiledCandidates(
            families,
            ObjectCache(cache_dir() / "objects"),
            detect_toolchain(families),
            detect_host(),
            Path(scratch),
            jobs,
        )
        with progress("compiling") as ticker:
            pack = make_pack(
                out,
                workload.name,
                workload.in_tuning_order(ms),
                target_of(target),
                compiled,
                progress=lambda digest, cached: ticker.advance(),
            )
    told = {
        "pack": str(out),
        "bytes": out.stat().st_size,
        "name": pack.name,
        "target": pack.target.to_value(),
        "problems": len(pack.problems),
        "candidates": sum(len(s.candidates) for s in pack.sets),
        "broken": sum(len(s.broken) for s in pack.sets),
    }
    if as_json:
        print_json(told)
    else:
        click.echo(
            f"{out}: {told['problems']} problems on {pack.target}, {told['candidates']} candidates, "
            f"{told['broken']} did not compile, {out.stat().st_size / 1e6:.2f} MB"
        )
    return 0
