"""Bundles for tests: small ones with real shared objects, and hypothesis strategies for manifests."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from hypothesis import strategies as st

from gemmcache.bundle.interface import (
    KERNEL,
    LIBRARY,
    PREDICTED,
    TUNED,
    Blob,
    DispatchTable,
    Entry,
    Kernel,
    Manifest,
    Part,
)
from gemmcache.bundle.writer import publish
from gemmcache.environment import Toolchain
from gemmcache.kernels.identity import kernel_digest
from gemmcache.kernels.interface import Config, KernelSpec
from gemmcache.problem import ProblemFamily
from gemmcache.target import TARGETS, Host, Target
from tests.strategies import configs, families, names, targets, texts, toolchains, versions

HOST = Host("x86_64", "x86-64-v3", "gnu")
TOOLCHAIN = Toolchain("4.8.1", 13, "0.1.15", (("operators", "ab" * 32),))
H200 = TARGETS["h200"]
B200 = TARGETS["b200"]


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=64)
def shared_object(symbols: tuple[str, ...], extra: str = "") -> bytes:
    """A real shared object that defines `symbols`, compiled from C."""
    source = "".join(f"int {s}(void) {{ return 0; }}\n" for s in symbols) + extra
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.c")
        path.write_text(source)
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-Wl,--build-id=none",
            "-o",
            f"{folder}/x.so",
            str(path),
        ]
        subprocess.run(command, check=True, capture_output=True)
        return Path(folder, "x.so").read_bytes()


def kernel(family: ProblemFamily, target: Target, host: Host = HOST, **params: int | str | bool) -> Kernel:
    spec = KernelSpec.for_family(Config.of("operators", **params), family, target.arch, target.sm_count)
    return Kernel(kernel_digest(spec, TOOLCHAIN, host), spec)


def table(family: ProblemFamily, entries: Sequence[tuple[int, Kernel | None]], count: int = 1) -> DispatchTable:
    return DispatchTable(
        family,
        tuple(
            Entry(
                m,
                KERNEL if k else LIBRARY,
                TUNED,
                k.digest if k else None,
                digest_of(f"record {family} {m}".encode()),
                us=10.5 + m,
                library_us=12.0 + m,
                error=0.0017,
            )
            for m, k in entries
        ),
        count,
    )


def part(target: Target, tables: Sequence[DispatchTable], kernels: Sequence[Kernel], blob: bytes | None) -> Part:
    return Part(
        target=target,
        host=HOST,
        toolchain=TOOLCHAIN,
        driver="580.159.03",
        cuda_runtime="13.0",
        blob=Blob(digest_of(blob), len(blob)) if blob else None,
        kernels=tuple(sorted(kernels, key=lambda k: k.digest)),
        tables=tuple(sorted(tables, key=lambda t: t.family.digest)),
    )


def bundle(salt: int = 0, *, real: bool = True, filler: int = 0) -> tuple[Manifest, dict[str, bytes]]:
    """A manifest of two parts with a blob each, and the blobs by digest; another content for another `salt`.

    Blobs are shared objects that export the kernels' symbols, or, unless `real`, `filler` and some more bytes.
    """
    parts, blobs = [], {}
    for target in (H200, B200):
        first = ProblemFamily.of(6144, 4096)
        second = ProblemFamily.of(4096, 4096, epilogue="bias+gelu_tanh")
        a = kernel(first, target, tile="128x256", salt=salt)
        b = kernel(second, target, tile="64x64", swap=True)
        data = (
            shared_object((a.symbol, b.symbol), f"int salt_{salt} = {salt};")
            if real
            else f"{target} {salt} ".encode() + bytes([salt % 251]) * filler
        )
        blobs[digest_of(data)] = data
        tables = [table(first, [(1, None), (16, a), (32, a)], 32), table(second, [(64, b), (128, None)])]
        parts.append(part(target, tables, [a, b], data))
    return Manifest("example", 1, "gemmcache 0.1.0", tuple(parts)), blobs


def published(folder: Path, salt: int = 0, *, real: bool = True, filler: int = 0) -> Manifest:
    """The manifest of a bundle that is now in `folder`."""
    manifest, blobs = bundle(salt, real=real, filler=filler)
    publish(folder, manifest, blobs)
    return manifest


_microseconds = st.one_of(st.none(), st.floats(1e-3, 1e9))
_digests = st.binary(min_size=32, max_size=32).map(bytes.hex)


@st.composite
def tables(draw: st.DrawFn, pool: Sequence[Kernel], family: ProblemFamily) -> DispatchTable:
    entries = []
    for m in sorted(
        draw(st.sets(st.one_of(st.integers(1, 300), st.integers(1, (1 << 31) - 1)), min_size=1, max_size=6))
    ):
        chosen = draw(st.sampled_from([None, *pool]))
        record = draw(st.one_of(st.none(), _digests))
        entries.append(
            Entry(
                m,
                KERNEL if chosen else LIBRARY,
                TUNED if record else PREDICTED,
                chosen.digest if chosen else None,
                record,
                draw(_microseconds),
                draw(_microseconds),
                draw(st.one_of(st.none(), st.floats(0, 1))),
            )
        )
    return DispatchTable(family, tuple(entries), draw(st.integers(1, 1 << 31)))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    target, toolchain = draw(targets()), draw(toolchains())
    host = draw(st.builds(Host, st.sampled_from(["x86_64", "aarch64"]), names, names))
    found, kernels = [], {}
    for family in draw(st.lists(families(), max_size=3, unique_by=lambda f: f.digest)):
        pool = []
        for config in draw(st.lists(configs(), max_size=2)):
            spec = KernelSpec.for_family(config, family, target.arch, draw(st.sampled_from([None, target.sm_count])), 1)
            pool.append(Kernel(kernel_digest(spec, toolchain, host), spec))
        made = draw(tables(pool, family))
        used = {e.kernel for e in made.entries}
        kernels.update({k.digest: k for k in pool if k.digest in used})
        found.append(made)
    return Part(
        target=target,
        host=host,
        toolchain=toolchain,
        driver=draw(versions),
        cuda_runtime=draw(versions),
        blob=Blob(draw(_digests), draw(st.integers(1, 1 << 30))) if kernels else None,
        kernels=tuple(kernels[d] for d in sorted(kernels)),
        tables=tuple(sorted(found, key=lambda t: t.family.digest)),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any valid manifest; blobs are named, not made."""
    some = draw(st.lists(parts(), min_size=1, max_size=2, unique_by=lambda p: (p.target, p.host)))
    sizes: dict[str, int] = {}
    some = [
        replace(p, blob=replace(p.blob, size=sizes.setdefault(p.blob.digest, p.blob.size))) if p.blob else p
        for p in some
    ]
    return Manifest(draw(texts), draw(st.integers(1, (1 << 53) - 1)), draw(texts), tuple(some))
