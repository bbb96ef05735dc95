"""`gemmcache verify`: every byte of a bundle against its digests."""

from __future__ import annotations

from pathlib import Path

import click

from gemmcache.cli.output import json_option, plain, print_json, print_table
from gemmcache.errors import EXIT_INTEGRITY, EXIT_OK


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@json_option
def command(bundle: Path, as_json: bool) -> int:
    """Check every byte of BUNDLE: digests, sizes, and that each kernel's function is there.

    Needs no GPU. Exit code 0 if all is well, 3 if not. Blobs that nothing names are listed; they do no harm.
    """
    from gemmcache.bundle.verify import verify

    report = verify(bundle)
    if as_json:
        print_json(report.to_value())
        return EXIT_OK if report.ok else EXIT_INTEGRITY
    if report.digest is not None:
        click.echo(f"bundle   {plain(report.name)} version {report.version}")
        click.echo(f"digest   {report.digest}")
        rows = [("named", b.digest, b.kernels, b.size) for b in report.blobs]
        rows += [("orphan", b.digest, 0, b.size) for b in report.orphans]
        print_table("", ("blob", "sha256", "kernels", "bytes"), rows, right=(2, 3))
    for name in report.leftovers:
        click.echo(f"left by a killed publication, or one under way: {name}")
    for problem in report.problems:
        click.echo(f"problem: {plain(problem)}", err=True)
    click.echo("ok" if report.ok else f"{len(report.problems)} problem(s)")
    return EXIT_OK if report.ok else EXIT_INTEGRITY
