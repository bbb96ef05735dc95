"""`gemmcache records`: list, show, exchange and remove tuning records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gemmcache.cli.options import existing_records_option, records_option, target_of
from gemmcache.cli.output import json_option, plain, print_json, print_table
from gemmcache.errors import EXIT_FINDINGS, EXIT_OK, MissingRecordError, StorageError, UsageError

if TYPE_CHECKING:
    from gemmcache.records.interface import TuningRecord
    from gemmcache.records.layers import Layered, Records
    from gemmcache.records.store import Changes
    from gemmcache.target import Target

F = TypeVar("F", bound=Callable[..., Any])

#: Hex digits of a digest in tables.
SHORT = 12


def target_option(function: F) -> F:
    """`--target NAME`: only records of one product."""
    return click.option("--target", "target_name", metavar="NAME", help="Only this GPU: h200, h100, ... or 'native'.")(
        function
    )


def _target(name: str | None) -> Target | None:
    return None if name is None else target_of(name)


def _selected(records: Records, target: Target | None, layer: str | None = None) -> list[Layered]:
    return [
        found
        for found in records.all()
        if (target is None or found.record.environment.target.key == target.key) and layer in (None, found.layer)
    ]


def _warn_quarantined(records: Records) -> None:
    for row in records.quarantined:
        click.echo(f"gemmcache: not used, {row}", err=True)


def _us(record: TuningRecord) -> float:
    return record.winner.us if record.winner else record.library_us


def _summary(found: Layered) -> dict[str, object]:
    record = found.record
    return {
        "digest": record.digest,
        "problem": str(record.problem),
        "target": str(record.environment.target),
        "choice": record.choice,
        "config": str(record.winner.config) if record.winner else None,
        "us": round(_us(record), 3),
        "library_us": round(record.library_us, 3),
        "x_library": round(record.speedup, 4),
        "driver": record.environment.driver,
        "measured_at": record.measured_at,
        "layer": found.layer,
    }


@click.group()
def command() -> None:
    """List, show, exchange and remove tuning records."""


@command.command("ls")
@target_option
@click.option("--layer", type=click.Choice(["user", "shipped"]), help="Only the user's own, or the shipped records.")
@records_option
@json_option
def list_records(target_name: str | None, layer: str | None, folder: Path | None, as_json: bool) -> None:
    """List records: the user's own, then the shipped ones that they don't hide."""
    from gemmcache.records.interchange import record_key
    from gemmcache.records.layers import Records

    with Records.open(folder, read_only=True) as records:
        rows = sorted(_selected(records, _target(target_name), layer), key=lambda f: record_key(f.record))
        summaries = [_summary(found) for found in rows]
        if as_json:
            bad = [{"row": q.rowid, "key": q.key, "reason": q.reason} for q in records.quarantined]
            print_json({"folder": str(records.folder), "records": summaries, "quarantined": bad})
            return
        _warn_quarantined(records)
        columns = (
            "digest",
            "problem",
            "target",
            "choice",
            "config",
            "us",
            "library us",
            "x library",
            "driver",
            "layer",
        )
        table = [
            (
                str(s["digest"])[:SHORT],
                *(s[name] for name in ("problem", "target", "choice")),
                s["config"] or "",
                f"{s['us']:.2f}",
                f"{s['library_us']:.2f}",
                f"{s['x_library']:.3f}",
                s["driver"] or "unknown",
                s["layer"],
            )
            for s in summaries
        ]
        print_table(f"{len(table)} records, user's in {records.folder}", columns, table, right=(5, 6, 7))


def _matching(found: list[Layered], prefix: str) -> Layered:
    """The one record whose digest begins with `prefix`."""
    text = prefix.lower()
    if not 4 <= len(text) <= 64 or set(text) - set("0123456789abcdef"):
        raise UsageError(
            f"'{prefix}' is not the beginning of a digest", remedy="4 to 64 hex digits, as records ls shows"
        )
    matches = [f for f in found if f.record.digest.startswith(text)]
    if not matches:
        raise MissingRecordError(f"no record's digest begins with '{text}'", remedy="gemmcache records ls")
    if len(matches) > 1:
        shown = ", ".join(f.record.digest[:16] for f in matches[:4])
        raise UsageError(f"{len(matches)} records' digests begin with '{text}'", remedy=f"give more digits: {shown}")
    return matches[0]


@command.command("show")
@click.argument("digest", metavar="DIGEST-PREFIX")
@existing_records_option
@json_option
def show(digest: str, folder: Path | None, as_json: bool) -> None:
    """Show one record with all its trials."""
    from gemmcache.records.layers import Records

    with Records.open(folder, read_only=True) as records:
        found = _matching(list(records.all()), digest)
    record = found.record
    if as_json:
        print_json({**_summary(found), "record": record.to_value()})
        return
    environment = record.environment
    lines = {
        "record": record.digest,
        "layer": found.layer,
        "problem": record.problem,
        "target": environment.target,
        "driver": environment.driver,
        "cuda runtime": environment.cuda_runtime,
        "torch": environment.torch,
        "cublas": environment.cublas,
        "dsl": environment.toolchain.dsl,
        "measured": record.measured_at,
        "choice": record.choice,
        "library": f"{record.baseline}, {record.library_us:.3f} us",
        "x library": f"{record.speedup:.3f}",
        "conditions": ", ".join(f"{name}={value:g}" for name, value in record.conditions) or "none recorded",
    }
    for name, value in lines.items():
        click.echo(f"{name:13} {'unknown' if value is None else plain(value)}")
    rows = [
        (
            rank,
            trial.config,
            trial.status,
            f"{trial.us:.3f}" if trial.samples_us else "",
            f"{record.library_us / trial.us:.3f}" if trial.samples_us else "",
            "" if trial.error is None else f"{trial.error:.2g}",
            len(trial.samples_us),
            trial.detail,
        )
        for rank, trial in enumerate(record.trials, start=1)
    ]
    columns = ("#", "config", "status", "us", "x library", "error", "samples", "detail")
    print_table(f"\n{len(rows)} trials", columns, rows, right=(0, 3, 4, 5, 6))


@command.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "csv"]),
    help="[default: by the file's suffix, else jsonl]",
)
@target_option
@click.option("--shipped", is_flag=True, help="Export the shipped records as well.")
@existing_records_option
@json_option
def export(
    file: Path, kind: str | None, target_name: str | None, shipped: bool, folder: Path | None, as_json: bool
) -> None:
    """Write the user's records to FILE: JSON lines to exchange, CSV (one row a trial) for spreadsheets."""
    from gemmcache.records.interchange import write_jsonl
    from gemmcache.records.layers import Records
    from gemmcache.records.spreadsheet import write_csv

    with Records.open(folder, shipped=shipped, read_only=True) as records:
        chosen = [found.record for found in _selected(records, _target(target_name))]
        _warn_quarantined(records)
    write = write_csv if (kind or file.suffix.removeprefix(".")) == "csv" else write_jsonl
    size = write(file, chosen)
    if as_json:
        print_json({"file": str(file), "records": len(chosen), "bytes": size})
    else:
        click.echo(f"{len(chosen)} records, {size} bytes: {file}", err=True)


def _report(changes: Changes, folder: Path, as_json: bool) -> None:
    if as_json:
        body = {"new": changes.new, "replaced": changes.replaced, "kept": changes.kept, "folder": str(folder)}
        print_json(body)
        return
    for name, digests in (("new", changes.new), ("replaced", changes.replaced), ("kept", changes.kept)):
        click.echo(f"{name:9} {len(digests)}")


def _put_all(folder: Path | None, incoming: list[TuningRecord], as_json: bool) -> None:
    from gemmcache.records.layers import Records

    with Records.open(folder) as records:
        _report(records.put_many(incoming), records.folder, as_json)
        _warn_quarantined(records)
        hidden = records.hides_newer(incoming)
        if hidden:
            click.echo(f"gemmcache: {hidden} of these are older than shipped records, and go before them", err=True)


@command.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@records_option
@json_option
def import_files(files: tuple[Path, ...], folder: Path | None, as_json: bool) -> None:
    """Put the records of JSON lines FILES into the user's: all of them, or none if a line is malformed."""
    from gemmcache.records.interchange import read_jsonl

    _put_all(folder, [record for file in files for record in read_jsonl(file)], as_json)


@command.command("merge")
@click.argument("sources", nargs=-1, required=True, metavar="FOLDER_OR_FILE...", type=click.Path(path_type=Path))
@records_option
@json_option
def merge(sources: tuple[Path, ...], folder: Path | None, as_json: bool) -> None:
    """Merge other records folders, folders of .jsonl files, or such files into the user's records.

    Of two records of one problem, environment and policy the newer stays.
    """
    _put_all(folder, [record for source in sources for record in _read_source(source)], as_json)


def _read_source(source: Path) -> list[TuningRecord]:
    from gemmcache.records.interchange import read_jsonl
    from gemmcache.records.layers import read_folder, record_files
    from gemmcache.records.store import RecordStore, is_store

    if not source.exists():
        raise StorageError(f"{source} does not exist")
    if not source.is_dir():
        return list(read_jsonl(source))
    if is_store(source):
        with RecordStore(source, read_only=True) as store:
            stored = list(store.all())
            for row in store.quarantined:
                click.echo(f"gemmcache: {source}: not merged, {row}", err=True)
            return stored
    if not record_files(source):
        raise UsageError(f"{source} holds neither a records database nor .jsonl files")
    return list(read_folder(source).all())


@command.command("rm")
@click.argument("digests", nargs=-1, required=True, metavar="DIGEST-PREFIX...")
@click.option("--yes", is_flag=True, help="Don't ask.")
@records_option
@json_option
def remove(digests: tuple[str, ...], yes: bool, folder: Path | None, as_json: bool) -> int:
    """Remove records from the user's own."""
    from gemmcache.records.layers import SHIPPED, Records

    with Records.open(folder) as records:
        everything = list(records.all())
        chosen = {found.record.digest: found for found in (_matching(everything, d) for d in digests)}
        for digest, found in chosen.items():
            if found.layer == SHIPPED:
                raise UsageError(
                    f"record {digest[:SHORT]} is shipped with gemmcache and can't be removed",
                    remedy="a newer record of your own goes before it",
                )
            target = plain(found.record.environment.target)
            click.echo(f"{digest[:SHORT]}  {found.record.problem}  {target}", err=True)
        if not yes and not click.confirm(f"Remove {len(chosen)} records?", err=True):
            click.echo("nothing removed", err=True)
            return EXIT_FINDINGS
        removed = records.remove(*chosen)
    if as_json:
        print_json({"removed": removed})
    else:
        click.echo(f"removed {len(removed)}")
    return EXIT_OK
