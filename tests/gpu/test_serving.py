"""A bundle in a process of its own, with no compiler: right numbers on every stream, in graphs, for every family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def served(bundle_path):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("serving_process.py")), str(bundle_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_family_at_ragged_and_tuned_m_is_right_on_all_streams_and_in_graphs(served):
    assert len(served["rows"]) >= 9
    wrong = [r for r in served["rows"] if not max(r["default"], r["side_stream"], r["graph"]) <= r["limit"]]
    assert wrong == []
    assert {r["served_by"] for r in served["rows"]} >= {"kernel"}


def test_no_compiler_and_no_tuner_in_the_process(served):
    assert served["poisoned_but_loaded"] == []


def test_every_call_was_counted_under_what_the_table_says(served):
    """Nothing falls back, and nothing that the bundle holds is missed."""
    assert served["counters"]["calls"] == 3 * len(served["rows"])
    assert [r for r in served["rows"] if r["served_by"] != r["expected"]] == []
    for name in {r["expected"] for r in served["rows"]}:
        assert served["counters"][name] == 3 * sum(r["expected"] == name for r in served["rows"])


def test_threads_on_their_own_streams_get_their_own_numbers(bundle, kernel_case):
    import threading

    from gemmcache.reference import relative_error

    family, m = kernel_case
    w = torch.randn(family.n, family.k, device="cuda", dtype=torch.bfloat16)
    errors = []

    def work(seed):
        stream = torch.cuda.Stream()
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.cuda.stream(stream):
            for _ in range(20):
                x = torch.randn(m, family.k, device="cuda", generator=generator).bfloat16()
                out = bundle.linear(x, w)
                stream.synchronize()
                errors.append(relative_error(out, x.float() @ w.float().T))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 80
    assert max(errors) < 1e-2


def test_a_call_under_capture_may_be_the_first_of_its_kernel(bundle_path, kernel_case):
    """In a process of its own, so that no kernel is loaded before."""
    family, m = kernel_case
    code = f"""
import warnings; warnings.simplefilter("ignore")
import torch, gemmcache
from gemmcache.reference import relative_error
bundle = gemmcache.load({str(bundle_path)!r})
x = torch.randn({m}, {family.k}, device="cuda", dtype=torch.bfloat16)
w = torch.randn({family.n}, {family.k}, device="cuda", dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = bundle.linear(x, w)
x.normal_(); out.fill_(float("nan")); graph.replay(); torch.cuda.synchronize()
assert bundle.counters["kernel"] == 1
assert relative_error(out, x.float() @ w.float().T) < 1e-2
assert bundle.warm_up() >= 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_replays_are_bit_identical(bundle, kernel_case):
    family, m = kernel_case
    x = torch.randn(m, family.k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(family.n, family.k, device="cuda", dtype=torch.bfloat16)
    first = bundle.linear(x, w)
    assert all(torch.equal(bundle.linear(x, w), first) for _ in range(20))
