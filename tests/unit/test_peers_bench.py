"""The benchmark's protocol on a device: cold inputs in whole rotations, and calls that no graph can hold."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from gemmcache.errors import DeviceError, MeasurementError
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import MeasurementPolicy
from gemmcache.tuning.bench import input_sets

torch = pytest.importorskip("torch")

from tools.peers import bench as bench_module  # noqa: E402
from tools.peers.bench import CudaBench  # noqa: E402
from tools.peers.interface import EAGER_TIMED, GRAPH  # noqa: E402

PROBLEM = ProblemFamily.of(64, 64, epilogue="bias+residual").at(3)
CPU = torch.device("cpu")
POLICY = MeasurementPolicy()


class FakeDevice:
    """A device on which every launch takes 10 us, in a graph or out of it."""

    def __init__(self):
        self.launches = self.slept = 0
        self.capturing = self.lost = False
        self.replayed = []

    def launch(self):
        self.launches += 1


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = fake.launches

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at - self.at) * 0.010

    class Graph:
        def capture_begin(self, capture_error_mode):
            fake.capturing, self.before = True, fake.launches

        def capture_end(self):
            fake.capturing = False
            self.held, fake.launches = fake.launches - self.before, self.before

        def replay(self):
            fake.launches += self.held
            fake.replayed.append(self.held)

    def synchronize(device=None):
        if fake.lost:
            raise RuntimeError("illegal memory access")

    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=synchronize)
    properties = SimpleNamespace(L2_cache_size=PROBLEM.min_bytes * 5 // 3, uuid="0")
    for name, value in {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device: stream,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "get_device_properties": lambda device: properties,
        "_sleep": lambda cycles: setattr(fake, "slept", fake.slept + cycles),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


def test_launches_rotate_through_more_than_the_cache_in_whole_turns(device):
    bench = CudaBench(PROBLEM, POLICY, CPU)
    sets = len(bench.inputs)
    assert sets == input_sets(PROBLEM, PROBLEM.min_bytes * 5 // 3, 3) == 5
    used = []

    def call(i):
        device.launch()
        used.append(next(n for n, other in enumerate(bench.inputs) if other is i))
        return i.out

    assert bench.ready("some", call) == GRAPH
    held = device.replayed[0]
    assert held % sets == 0
    assert held * 10 >= POLICY.min_graph_us
    assert used[-held:] == [n % sets for n in range(held)]
    assert bench.sample_us("some") == pytest.approx(10.0)
    assert device.replayed == [held] * 2
    assert device.slept


def test_results_that_a_call_makes_rotate_too(device):
    bench = CudaBench(PROBLEM, POLICY, CPU)
    addresses = []

    def call(i):
        device.launch()
        made = torch.empty_like(i.out)
        addresses.append(made.data_ptr())
        return made

    bench.ready("some", call)
    last = addresses[-len(bench.inputs) :]
    assert len(set(last)) == len(last)


def test_what_can_not_be_captured_is_timed_call_by_call(device):
    bench = CudaBench(PROBLEM, POLICY, CPU)

    def call(i):
        if device.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        device.launch()
        return i.out

    assert bench.ready("some", call) == EAGER_TIMED
    assert not device.capturing
    assert bench.sample_us("some") == pytest.approx(10.0)
    assert device.replayed == []


def test_a_device_that_is_lost_in_a_capture_is_no_slow_path(device):
    bench = CudaBench(PROBLEM, POLICY, CPU)

    def call(i):
        device.launch()
        if device.capturing:
            device.lost = True
            raise RuntimeError("illegal memory access")
        return i.out

    with pytest.raises(DeviceError, match="lost"):
        bench.ready("some", call)


def test_the_first_result_is_checked_against_the_reference_with_out_filled(device):
    bench = CudaBench(PROBLEM, POLICY, CPU, sets=1)
    assert len(bench.inputs) == 1

    def right(i):
        value = torch.addmm(i.operands["bias"], i.a, i.b.t()) + i.operands["residual"]
        return i.out.copy_(value)

    assert bench.error(bench.run(right)) < 0.01
    assert bench.error(bench.run(lambda i: i.out)) == float("inf")
    assert bench.error(bench.run(lambda i: right(i) * 1.5)) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(("us", "calls"), [(1.0, 100), (2_000.0, 25), (100_000.0, 10)])
def test_host_calls_fit_into_the_queue(device, us, calls):
    bench = CudaBench(PROBLEM, POLICY, CPU, sets=1)
    seen = []
    assert bench.host_us(seen.append, us) > 0
    assert len(seen) == calls * bench_module._HOST_ROUNDS


def test_what_can_not_be_measured_is_refused_before_anything_is_made(device):
    from dataclasses import replace

    with pytest.raises(MeasurementError, match="batches"):
        CudaBench(replace(PROBLEM.family, batch=2).at(3), POLICY, CPU)
