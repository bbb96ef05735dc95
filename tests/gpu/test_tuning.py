"""The real bench and worker: right numbers in, wrong and deadly candidates out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import FAILED, OK, WRONG, MeasurementPolicy
from gemmcache.tuning.interface import LIBRARY_KEY, Candidate
from tests.fakes import candidate

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

FAMILY = ProblemFamily.of(2048, 1024)
GOOD, WRONG_AT_RAGGED_M, DEADLY, UNWRITTEN, WRONG_IN_ONE_COLUMN = (candidate(i) for i in range(5))


def good(a, b, out):
    torch.mm(a, b.t(), out=out)


def wrong_at_ragged_m(a, b, out):
    torch.mm(a, b.t(), out=out)
    if a.shape[0] % 2:
        out.mul_(1.5)


def wrong_in_one_column(a, b, out):
    torch.mm(a, b.t(), out=out)
    out[:, 7] = 0


def unwritten(a, b, out):
    torch.mm(a[:-1], b.t(), out=out[:-1])


def deadly(a, b, out):
    """Indexes far out of bounds: a device-side assertion, after which the context is lost."""
    index = torch.full((1,), 1 << 40, device=a.device, dtype=torch.long)
    out.copy_(a[index].sum().expand_as(out))


FUNCTIONS = {
    GOOD.kernel: good,
    WRONG_AT_RAGGED_M.kernel: wrong_at_ragged_m,
    DEADLY.kernel: deadly,
    UNWRITTEN.kernel: unwritten,
    WRONG_IN_ONE_COLUMN.kernel: wrong_in_one_column,
}


def bench_of(m):
    from gemmcache.tuning.bench import FamilyInputs, GpuBench

    device = torch.device("cuda", 0)
    return GpuBench(FAMILY.at(m), FamilyInputs(FAMILY, 4, device, 0), FUNCTIONS, MeasurementPolicy(), device)


@pytest.mark.parametrize("m", [1, 2, 16, 600])
def test_the_numeric_gate_tells_right_from_wrong(m):
    bench = bench_of(m)
    assert bench.error(LIBRARY_KEY) < 1e-2
    assert bench.error(GOOD.kernel) < 1e-2
    assert bench.error(WRONG_AT_RAGGED_M.kernel) > 0.3
    assert bench.error(UNWRITTEN.kernel) == float("inf")
    # Far too little for the norm over all of out.
    assert bench.error(WRONG_IN_ONE_COLUMN.kernel) == float("inf")


def test_the_timing_agrees_with_events_around_a_loop():
    bench = bench_of(512)
    bench.prepare(GOOD.kernel)
    replayed = sorted(bench.sample_us(GOOD.kernel) for _ in range(9))[4]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(200):
            good(bench.a[i % bench.sets][:512], bench.inputs.weights[i % bench.sets], bench.out[i % bench.sets][:512])
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    assert replayed == pytest.approx(start.elapsed_time(end) * 1000 / 200, rel=0.25)


def body(pipe, device, toolchain):
    """The real worker, with candidates that are Python functions."""
    from gemmcache.tuning import worker

    worker._Host._functions = lambda self, task: {c.kernel: FUNCTIONS[c.kernel] for c in task.candidates}
    worker.serve(pipe, device, toolchain)


def test_a_deadly_candidate_costs_itself_and_a_wrong_one_loses():
    from gemmcache.kernels.identity import detect_toolchain
    from gemmcache.tuning.executor import WorkerExecutor
    from gemmcache.tuning.worker import Task

    candidates = tuple(
        Candidate(c.config, c.kernel, i) for i, c in enumerate((GOOD, WRONG_AT_RAGGED_M, DEADLY, UNWRITTEN))
    )
    with WorkerExecutor(0, detect_toolchain([]), body=body) as executor:
        environment = executor.environment
        assert environment.driver
        assert environment.target.sm_count == torch.cuda.get_device_properties(0).multi_processor_count
        outcome = executor.run(Task(FAMILY.at(16), candidates, None, MeasurementPolicy(), "", "", 13))
        assert len(executor.run(Task(FAMILY.at(32), candidates[:1], None, MeasurementPolicy(), "", "", 13)).trials) == 1
    status = {t.config: t.status for t in outcome.trials}
    assert status == {
        GOOD.config: OK,
        WRONG_AT_RAGGED_M.config: WRONG,
        DEADLY.config: FAILED,
        UNWRITTEN.config: WRONG,
    }
    assert len(outcome.baseline_us) == MeasurementPolicy().decision_rounds + MeasurementPolicy().calm_rounds


@pytest.mark.parametrize("packed", [False, True])
def test_tune_then_build_then_serve(packed, tmp_path, monkeypatch):
    """The whole way on this machine, for a family of problems that nothing is shipped for, also by way of a pack."""
    pytest.importorskip("cutlass")
    import json
    import warnings

    import gemmcache
    from gemmcache.cli.app import run
    from gemmcache.reference import relative_error

    monkeypatch.setenv("GEMMCACHE_RECORDS_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("GEMMCACHE_CACHE_DIR", os.environ.get("GEMMCACHE_CACHE_DIR", str(tmp_path / "cache")))
    source = tmp_path / "problems.json"
    source.write_text(json.dumps([{"n": 3072, "k": 2048, "dtype": "bf16", "ms": [64, 128]}]))
    pack = tmp_path / "x.pack"
    if packed:
        assert run(["pack", str(source), "--out", str(pack)]) == 0
    assert run(["tune", "--pack", str(pack)] if packed else ["tune", str(source)]) == 0
    assert run(["build", str(source), "--out", str(tmp_path / "bundle"), "--require-tuned"]) == 0
    with warnings.catch_warnings():
        # Tuned here and now: nothing can be stale.
        warnings.simplefilter("error")
        bundle = gemmcache.load(Path(tmp_path / "bundle"))
    for m in (49, 64, 113, 128):
        x, w = (torch.randn(r, 2048, device="cuda", dtype=torch.bfloat16) for r in (m, 3072))
        assert relative_error(bundle.linear(x, w), x.float() @ w.float().T) < 1e-2
    counters = bundle.counters
    assert counters["kernel"] + counters["library"] == counters["calls"] == 4
