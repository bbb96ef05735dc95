"""All that is known about an open bundle, as one JSON value: what `gemmcache inspect --json` prints."""

from __future__ import annotations

from collections import Counter

from gemmcache.bundle import resources
from gemmcache.bundle.interface import MAJOR, MINOR, DispatchTable, Kernel, Part
from gemmcache.bundle.reader import BundleReader
from gemmcache.errors import IntegrityError, ToolError


def describe(reader: BundleReader, *, with_resources: bool = True) -> dict[str, object]:
    """The bundle as a value of maps, lists, texts and numbers; times in microseconds, sizes in bytes.

    `resources` of a kernel are None where cuobjdump is missing, or can't tell: `notes` say why. Blobs are
    read (and checked) only for them. Raises `IntegrityError` for a damaged blob.
    """
    manifest = reader.manifest
    notes: list[str] = []
    return {
        "path": str(reader.path),
        "digest": reader.digest,
        "format": {"major": MAJOR, "minor": MINOR},
        "name": manifest.name,
        "version": manifest.version,
        "generator": manifest.generator,
        "manifest_bytes": reader.manifest_bytes,
        "blob_bytes": sum(blob.size for blob in manifest.blobs),
        "parts": [_part(reader, part, notes, with_resources) for part in manifest.parts],
        "notes": notes,
    }


def _part(reader: BundleReader, part: Part, notes: list[str], with_resources: bool) -> dict[str, object]:
    used = Counter(e.kernel for t in part.tables for e in t.entries if e.kernel)
    usage = _usage(reader, part, notes) if with_resources else {}
    kernels = {k.digest: k for k in part.kernels}
    return {
        "target": part.target.to_value(),
        "host": part.host.to_value(),
        "toolchain": part.toolchain.to_value(),
        "driver": part.driver,
        "cuda_runtime": part.cuda_runtime,
        "blob": part.blob.to_value() if part.blob else None,
        "kernels": [
            {
                **k.to_value(),
                "function": k.function,
                "symbol": k.symbol,
                "config": str(k.spec.config),
                "entries": used[k.digest],
                "resources": [u.to_value() for u in usage[k.symbol]] if k.symbol in usage else None,
            }
            for k in part.kernels
        ],
        "tables": [_table(table, kernels) for table in part.tables],
    }


def _table(table: DispatchTable, kernels: dict[str, Kernel]) -> dict[str, object]:
    return {
        "family": table.family.to_value(),
        "family_digest": table.family.digest,
        "title": str(table.family),
        "count": table.count,
        "entries": [
            {
                **entry.to_value(),
                "first_m": first,
                "last_m": last,
                "function": kernels[entry.kernel].function if entry.kernel else None,
                "config": str(kernels[entry.kernel].spec.config) if entry.kernel else None,
            }
            for entry, (first, last) in zip(table.entries, table.ladder.steps(), strict=True)
        ],
    }


def _usage(reader: BundleReader, part: Part, notes: list[str]) -> dict[str, tuple[resources.Usage, ...]]:
    if part.blob is None:
        return {}
    tool = resources.find_cuobjdump()
    if tool is None:
        note = f"registers and shared memory are not known without cuobjdump: pip install {resources.PACKAGE}"
        if note not in notes:
            notes.append(note)
        return {}
    data = reader.read_blob(part.blob)
    try:
        usage = resources.kernel_usage(data, tool, [k.symbol for k in part.kernels])
    except (IntegrityError, ToolError) as error:
        notes.append(f"{part.target}: registers and shared memory are not known: {error.message}")
        return {}
    if not usage:
        notes.append(f"{part.target}: registers and shared memory are not known: not one GPU image a kernel")
    return usage
