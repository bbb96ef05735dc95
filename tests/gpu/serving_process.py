"""Run as a program: serves a bundle with the compiler made unimportable, and prints what it found as JSON.

    python serving_process.py BUNDLE

For every family of problems that can be called, whatever its epilogue and dtypes, and every m it compares with an fp32
reference: on the default stream, on a side stream, and by replaying a captured CUDA graph on new data.
"""

import json
import sys
import time
from pathlib import Path

POISONED = ("cutlass", "diskcache", "click", "rich", "transformers", "gemmcache.build", "gemmcache.tuning")
MS = (1, 3, 16, 77, 200, 333, 1024, 2053, 8192)


def counter_of(choice) -> str:
    """The counter of a call that the dispatch table gives `choice`."""
    if choice.entry is None:
        return "between" if choice.where == "between" else f"miss_{choice.where}"
    return "library" if choice.function is None else "kernel"


def main(path: str) -> None:
    for name in POISONED:
        sys.modules[name] = None
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import torch
    import tvm_ffi  # noqa: F401

    import gemmcache
    from gemmcache.reference import relative_error
    from tests.calls import call_of, can_be_called, expected, limit_of

    torch.cuda.init()
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.perf_counter()
    bundle = gemmcache.load(path)
    load_ms = (time.perf_counter() - started) * 1e3
    rows = []

    def error(out, family, call):
        return relative_error(out.float(), expected(family, call))

    for family, dispatcher in bundle.dispatchers.items():
        if not can_be_called(family):
            continue
        for m in MS:
            errors = {}
            call = call_of(family, m, "cuda")
            before = bundle.counters
            errors["default"] = error(bundle.linear(**call), family, call)
            after = bundle.counters
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other = call_of(family, m, "cuda")
                out = bundle.linear(**other)
            side.synchronize()
            errors["side_stream"] = error(out, family, other)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = bundle.linear(**call)
            for name, tensor in call.items():
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(other[name])
            captured.view(torch.uint8).fill_(0xFF)
            graph.replay()
            torch.cuda.synchronize()
            errors["graph"] = error(captured, family, other)
            (served_by,) = [name for name in after if name != "calls" and after[name] > before[name]]
            rows.append(
                {
                    "family": str(family),
                    "m": m,
                    "served_by": served_by,
                    "expected": counter_of(dispatcher.choose(m)),
                    "limit": limit_of(family),
                    **errors,
                }
            )
            del captured, out, graph, call, other
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
