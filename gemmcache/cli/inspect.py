"""`gemmcache inspect`: what is in a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gemmcache.cli.output import json_option, plain, print_json, print_table


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@json_option
def command(bundle: Path, as_json: bool) -> int:
    """Show what is in BUNDLE: its targets, kernels, and which of them serves which m.

    Needs no GPU. Registers and shared memory are shown where nvidia-cuda-cuobjdump is installed.
    """
    from gemmcache.bundle.describe import describe
    from gemmcache.bundle.reader import BundleReader

    with BundleReader.open(bundle) as reader:
        value: dict[str, Any] = describe(reader)
    if as_json:
        print_json(value)
        return 0
    _lines(
        ("bundle", f"{value['name']} version {value['version']}"),
        ("digest", value["digest"]),
        ("format", f"{value['format']['major']}.{value['format']['minor']}"),
        ("made by", value["generator"]),
        ("size", f"manifest {value['manifest_bytes']} bytes, blobs {value['blob_bytes']} bytes"),
    )
    for part in value["parts"]:
        _show_part(part)
    for note in value["notes"]:
        click.echo(f"note: {plain(note)}", err=True)
    return 0


def _lines(*pairs: tuple[str, object]) -> None:
    for name, text in pairs:
        click.echo(f"{name:<10}{plain(text)}")


def _show_part(part: dict[str, Any]) -> None:
    target, host, tools, blob = part["target"], part["host"], part["toolchain"], part["blob"]
    click.echo("")
    _lines(
        ("target", f"{target['product']} ({target['arch']}, {target['sm_count']} SMs)"),
        ("host", f"{host['arch']} {host['isa']} {host['libc']}"),
        ("toolchain", f"DSL {tools['dsl'] or 'unknown'}, tvm-ffi {tools['tvm_ffi'] or 'unknown'}"),
        *((("sources", f"{name} {digest}") for name, digest in sorted(tools["kernel_sources"].items()))),
        ("driver", part["driver"] or "unknown"),
        ("CUDA", part["cuda_runtime"] or "unknown"),
        (
            "blob",
            f"{blob['digest']} ({blob['size']} bytes)" if blob else "none: the library serves everything",
        ),
    )
    if part["kernels"]:
        click.echo("")
        print_table(
            "kernels",
            ("function", "config", "epilogue", "entries", "registers", "stack", "shared"),
            ([*_kernel_row(kernel)] for kernel in part["kernels"]),
            right=(3, 4, 5, 6),
        )
    for table in part["tables"]:
        click.echo("")
        print_table(
            f"{plain(table['title'])} (x{table['count']})",
            ("m", "choice", "origin", "us", "library us", "error", "config"),
            (_entry_row(entry) for entry in table["entries"]),
            right=(3, 4, 5),
        )


def _kernel_row(kernel: dict[str, Any]) -> tuple[object, ...]:
    used = kernel["resources"]
    return (
        kernel["function"],
        kernel["config"],
        kernel["spec"]["epilogue"],
        kernel["entries"],
        *(max((u[name] for u in used), default=None) if used else None for name in ("registers", "stack", "shared")),
    )


def _entry_row(entry: dict[str, Any]) -> tuple[object, ...]:
    first, last = entry["first_m"], entry["last_m"]
    return (
        str(last) if first == last else f"{first}..{last}",
        entry["choice"],
        entry["origin"],
        _rounded(entry["us"], 2),
        _rounded(entry["library_us"], 2),
        _rounded(entry["error"], 5),
        entry["config"],
    )


def _rounded(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
