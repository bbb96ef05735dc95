"""Measures what serving costs beside the kernels: import, load and host time of a call, on the GPU at hand.

    python tools/measure_runtime.py BUNDLE [--json FILE]

Prints a table; times are medians, in microseconds for calls and milliseconds for the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median


def import_ms(statement: str, runs: int = 3) -> float:
    """Median milliseconds that `statement` takes in a fresh interpreter."""
    code = f"import time; s = time.perf_counter(); {statement}; print(time.perf_counter() - s)"
    out = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(runs)
    ]
    return median(float(o.stdout) for o in out) * 1e3


LOAD = """
import sys, time, json, warnings
warnings.simplefilter("ignore")
import torch, tvm_ffi, gemmcache
from gemmcache.runtime import loader
torch.cuda.init(); torch.empty(1, device="cuda")
times = []
for _ in range(int(sys.argv[2])):
    s = time.perf_counter(); bundle = gemmcache.load(sys.argv[1]); times.append((time.perf_counter() - s) * 1e3)
s = time.perf_counter(); n = bundle.warm_up(); warm = (time.perf_counter() - s) * 1e3
print(json.dumps({"first_load_ms": times[0], "load_ms": sorted(times)[len(times) // 2], "warm_up_ms": warm,
                  "kernels": len(bundle.part.kernels), "warmed": n}))
"""


def load_times(bundle: str, runs: int = 3) -> dict[str, float]:
    """First and repeated load of a bundle in a fresh process whose CUDA context is there already."""
    done = [
        subprocess.run([sys.executable, "-c", LOAD, bundle, "5"], capture_output=True, text=True, check=True)
        for _ in range(runs)
    ]
    rows = [json.loads(d.stdout) for d in done]
    return {name: median(row[name] for row in rows) for name in rows[0]}


def host_us(call: Callable[[], object], calls: int = 300, rounds: int = 15) -> float:
    """Median host microseconds of a call: launches are queued, so that the device is never waited for."""
    import torch

    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return median(samples)


def call_times(path: str) -> dict[str, float]:
    """Host microseconds of `bundle.linear` by a kernel and by the library, beside torch's own calls."""
    import torch

    import gemmcache
    from gemmcache.problem import ProblemFamily

    warnings.simplefilter("ignore")
    bundle = gemmcache.load(path)
    found: dict[str, float] = {}
    for family, dispatcher in sorted(bundle.dispatchers.items(), key=lambda item: item[0].n):
        for entry in dispatcher.table.entries:
            plain = family == ProblemFamily.of(family.n, family.k)
            if entry.m <= 256 and f"linear_{entry.choice}" not in found and plain:
                shapes = (entry.m, family.k), (family.n, family.k), (entry.m, family.n)
                x, w, out = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
                with torch.inference_mode():
                    found[f"linear_{entry.choice}"] = host_us(partial(bundle.linear, x, w))
                    found[f"linear_{entry.choice}_out"] = host_us(partial(bundle.linear, x, w, out=out))
                    found["F.linear"] = host_us(partial(torch.nn.functional.linear, x, w))
                    found["torch.mm(out=)"] = host_us(partial(torch.mm, x, w.t(), out=out))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load-only", action="store_true", help="measure loading, not imports and calls")
    options = parser.parse_args()
    results = {f"bundle {name}": value for name, value in load_times(options.bundle).items()}
    if not options.load_only:
        results |= imports_and_calls(options.bundle)
    for name, value in results.items():
        print(f"{name:32} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, sort_keys=True))


def imports_and_calls(bundle: str) -> dict[str, float]:
    return {
        "import torch, ms": import_ms("import torch"),
        "import torch, gemmcache, ms": import_ms("import torch, gemmcache"),
        "import gemmcache, ms": import_ms("import gemmcache"),
        **{f"host us {name}": value for name, value in call_times(bundle).items()},
    }


if __name__ == "__main__":
    main()
