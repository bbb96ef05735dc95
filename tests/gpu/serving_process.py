"""Run as a program: serves a bundle with the compiler made unimportable, and prints what it found as JSON.

    python serving_process.py BUNDLE

For every family of problems and every m it compares with an fp32 reference: on the default stream, on a side stream,
and by replaying a captured CUDA graph on new data.
"""

import json
import sys
import time

POISONED = ("cutlass", "diskcache", "click", "rich", "transformers", "gemmcache.build", "gemmcache.tuning")
MS = (1, 3, 16, 77, 200, 333, 1024, 2053, 8192)


def main(path: str) -> None:
    for name in POISONED:
        sys.modules[name] = None
    import torch
    import tvm_ffi  # noqa: F401

    import gemmcache
    from gemmcache.reference import relative_error

    torch.cuda.init()
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.perf_counter()
    bundle = gemmcache.load(path)
    load_ms = (time.perf_counter() - started) * 1e3
    rows = []
    for family in bundle.dispatchers:
        bias = torch.randn(family.n, device="cuda", dtype=torch.bfloat16) if family.epilogue.bias else None
        w = torch.randn(family.n, family.k, device="cuda", dtype=torch.bfloat16) / family.k**0.5
        w32 = w.float()
        for m in MS:
            errors = {}
            x = torch.randn(m, family.k, device="cuda", dtype=torch.bfloat16)

            def expected(x=x, w32=w32, bias=bias):
                return torch.nn.functional.linear(x.float(), w32, None if bias is None else bias.float())

            before = bundle.counters
            errors["default"] = relative_error(bundle.linear(x, w, bias), expected())
            after = bundle.counters
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = torch.randn(m, family.k, device="cuda", dtype=torch.bfloat16)
                out = bundle.linear(y, w, bias)
            side.synchronize()
            errors["side_stream"] = relative_error(out, expected(y))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = bundle.linear(x, w, bias)
            x.normal_()
            captured.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            errors["graph"] = relative_error(captured, expected())
            kind = "kernel" if after["kernel"] > before["kernel"] else "library"
            rows.append({"family": str(family), "m": m, "served_by": kind, **errors})
            del captured, out, graph
        del w, w32
        torch.cuda.empty_cache()
    loaded = sorted(n for n in sys.modules if n.split(".")[0] in POISONED and sys.modules[n] is not None)
    print(
        json.dumps(
            {
                "rows": rows,
                "load_ms": load_ms,
                "counters": bundle.counters,
                "judgement": bundle.judgement.to_value(),
                "poisoned_but_loaded": loaded,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
