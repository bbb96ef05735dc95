"""Builds a bundle of many kernels, to measure what loading one costs: every config of the space at an m of its own.

python tools/many_kernels.py --target h200 --kernels 100 --out DIR
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from gemmcache.build.builder import build
from gemmcache.build.objects import ObjectCache
from gemmcache.build.plan import TargetPlan
from gemmcache.bundle.interface import KERNEL, PREDICTED, DispatchTable, Entry
from gemmcache.kernels.identity import detect_toolchain, kernel_digest
from gemmcache.kernels.interface import KernelSpec
from gemmcache.kernels.registry import kernel_families
from gemmcache.paths import cache_dir
from gemmcache.problem import ProblemFamily
from gemmcache.target import detect_host, named_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--kernels", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target, host, families = named_target(options.target), detect_host(), kernel_families()
    toolchain = detect_toolchain(families.values())
    specs: dict[str, KernelSpec] = {}
    tables = []
    for dtype in ("bfloat16", "float16"):
        problem_family = ProblemFamily.of(4096, 4096, dtype)
        entries = []
        configs = ((f, c) for f in families.values() for c in f.configs(problem_family, target))
        for m, (family, config) in enumerate(islice(configs, options.kernels - len(specs)), 1):
            spec = family.spec(config, problem_family, target)
            digest = kernel_digest(spec, toolchain, host)
            specs[digest] = spec
            entries.append(Entry(m, KERNEL, PREDICTED, digest))
        if entries:
            tables.append(DispatchTable(problem_family, tuple(entries)))
    tables.sort(key=lambda t: t.family.digest)
    plan = TargetPlan(target, tuple(tables), specs, None, None)
    built = build(
        "many-kernels",
        [plan],
        options.out,
        toolchain=toolchain,
        host=host,
        cache=ObjectCache(cache_dir() / "objects"),
    )
    print(f"{built.folder}: {len(specs)} kernels, {built.blob_bytes} bytes")


if __name__ == "__main__":
    main()
