"""Times a bundle against the library through `bundle.linear`, in one run, at tuned ms and at ms between them.

    python tools/measure_bundle.py BUNDLE [--json FILE] [--m 1,3,16]

Both sides run in CUDA graphs over inputs that rotate through three times the L2 cache, in interleaved rounds, as
`gemmcache tune` measures. Prints one line a problem: us, TFLOP/s, GB/s, x cuBLAS.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

import gemmcache
from gemmcache.ladder import parse_ms
from gemmcache.records.interface import MeasurementPolicy
from gemmcache.tuning.bench import FamilyInputs, GpuBench, input_sets
from gemmcache.tuning.interface import LIBRARY_KEY

BUNDLE = "bundle"
ROUNDS = 9


def measure(bundle: Any, ms: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row a problem, for every family of problems without epilogue that the bundle holds."""
    policy = MeasurementPolicy()
    device = torch.device("cuda", torch.cuda.current_device())
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    rows = []
    for family, dispatcher in sorted(bundle.dispatchers.items(), key=lambda item: (item[0].n, item[0].k)):
        if family.epilogue:
            continue
        inputs = FamilyInputs(family, input_sets(family.at(1), l2, policy.l2_multiple), device, seed=1)
        for m in ms:
            problem = family.at(m)
            functions = {BUNDLE: lambda a, b, out: bundle.linear(a, b, out=out)}
            bench = GpuBench(problem, inputs, functions, policy, device)
            keys = (LIBRARY_KEY, BUNDLE)
            for key in keys:
                bench.prepare(key)
                bench.sample_us(key)
            samples: dict[str, list[float]] = {key: [] for key in keys}
            for turn in range(ROUNDS):
                for key in keys if turn % 2 else keys[::-1]:
                    samples[key].append(bench.sample_us(key))
            us, library_us = median(samples[BUNDLE]), median(samples[LIBRARY_KEY])
            choice = dispatcher.choose(m)
            served = "kernel" if choice.function else "library" if choice.entry else choice.where
            rows.append(
                {"m": m, "n": family.n, "k": family.k, "served_by": served, "us": us, "library_us": library_us}
                | {"speedup": library_us / us, "error": bench.error(BUNDLE)}
            )
            print(
                f"{m:5} {family.n:6}x{family.k:<6} {us:10.2f} us {problem.flops / us / 1e6:6.0f} TFLOP/s "
                f"{problem.min_bytes / us / 1e3:6.0f} GB/s {library_us / us:6.3f} x cuBLAS  {served}"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--m", type=parse_ms, default=parse_ms("1,3,4,16,24,64,77,128,200,333,512,1024,2053,4096,8192"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = measure(gemmcache.load(options.bundle), options.m)
    by_kernel = [r["speedup"] for r in rows if r["served_by"] == "kernel"]
    print(
        f"{len(rows)} problems: geometric mean {geometric_mean(r['speedup'] for r in rows):.3f} x cuBLAS, worst "
        f"{min(r['speedup'] for r in rows):.3f}; where a kernel serves ({len(by_kernel)}) "
        f"{geometric_mean(by_kernel):.3f}, worst {min(by_kernel):.3f}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
