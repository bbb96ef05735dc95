"""A problem on a CUDA device: cold inputs, CUDA graphs, host time, and the check of the numbers.

The protocol is that of `gemmcache.tuning.bench`, for calls that make their own output and that may not be capturable.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from gemmcache.errors import DeviceError, MeasurementError
from gemmcache.problem import Problem
from gemmcache.records.interface import MeasurementPolicy
from gemmcache.reference import reference, relative_error
from gemmcache.tuning.bench import FamilyInputs, device_conditions, input_sets
from tools.peers.interface import EAGER_TIMED, GRAPH, Bench, Call, Inputs

if TYPE_CHECKING:
    from torch import Tensor

_MAX_LAUNCHES = 512
_WARM_UP_CALLS = 3
#: GPU clock cycles of idling before a timing: until a graph's launch is over, and per launch of a loop of calls.
_HEAD_START_CYCLES = 100_000
_CALL_CYCLES = 60_000
_HOST_ROUNDS = 7
#: A round of queued calls takes about this long on the device at most; the queue holds some thousand launches.
_HOST_ROUND_US = 50_000
_SETTLE_SECONDS = 1.5


def flaw(problem: Problem) -> str | None:
    """Why a problem can't be measured, None if it can."""
    family = problem.family
    if family.batch != 1 or (family.a_layout, family.b_layout, family.out_layout) != ("mk", "nk", "mn"):
        return "batches and layouts other than mk,nk,mn can't be measured"
    return None


def make_inputs(problem: Problem, sets: int, device: torch.device, seed: int) -> list[Inputs]:
    """`sets` independent sets of random operands of `problem`, epilogue tensors included."""
    family, m = problem.family, problem.m
    source = FamilyInputs(family, sets, device, seed)
    row_size = m if family.epilogue.scale in ("row", "row_column") else 1
    column_size = family.n if family.epilogue.scale in ("column", "row_column") else 1
    shapes = {"scale_a": (row_size, 1), "scale_b": (1, column_size)}
    made = []
    for weight in source.weights:
        operands = {}
        for name in family.epilogue.operands():
            if name in shapes:
                operands[name] = torch.rand(shapes[name], device=device, generator=source.generator) + 0.5
            elif name == "bias":
                operands[name] = source.random(1, family.n, family.out_dtype, device)[0]
            else:
                operands[name] = source.random(m, family.out_columns, family.out_dtype, device)
        out = torch.empty(m, family.out_columns, device=device, dtype=getattr(torch, family.out_dtype))
        made.append(Inputs(source.random(m, family.k, family.a_dtype, device), weight, out, operands))
    return made


def expected_of(problem: Problem, inputs: Inputs) -> Tensor:
    """The exact result [M, N'] in fp32."""
    return reference(problem.family, inputs.a, inputs.b, inputs.operands)


def numeric_error(expected: Tensor, result: Tensor) -> float:
    """||result - expected|| / ||expected||; infinity for a result of another shape, or with NaN left in it."""
    if tuple(result.shape) != tuple(expected.shape):
        return float("inf")
    return relative_error(result.float(), expected)


class CudaBench(Bench):
    """`Bench` on a CUDA device. Memory: as many sets of inputs as move three times the L2 cache, at least one."""

    def __init__(
        self, problem: Problem, policy: MeasurementPolicy, device: torch.device, sets: int | None = None
    ) -> None:
        found = flaw(problem)
        if found:
            raise MeasurementError(f"{problem}: {found}")
        self.problem, self.policy, self.device = problem, policy, device
        # What the problem before held in graphs' pools of their own is not used again otherwise.
        gc.collect()
        torch.cuda.empty_cache()
        properties = torch.cuda.get_device_properties(device)
        self._uuid = str(properties.uuid)
        wanted = sets or input_sets(problem, properties.L2_cache_size, policy.l2_multiple)
        self.inputs: Sequence[Inputs] = make_inputs(problem, wanted, device, policy.seed)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The inputs were made on the current stream.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._loops: dict[str, Call] = {}
        self._launches = 0
        self._expected: Tensor | None = None

    def run(self, call: Call) -> Tensor:
        first = self.inputs[0]
        if first.out.is_floating_point():
            first.out.fill_(float("nan"))
        torch.cuda.synchronize(self.device)
        with torch.no_grad(), torch.cuda.stream(self.stream):
            result = call(first)
        self.stream.synchronize()
        return result

    def error(self, result: Tensor) -> float:
        if self._expected is None:
            self._expected = expected_of(self.problem, self.inputs[0])
        return numeric_error(self._expected, result)

    def check_device(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceError(f"the device's context is lost: {error}") from error

    def ready(self, name: str, call: Call) -> str:
        with torch.no_grad(), torch.cuda.stream(self.stream):
            for i in range(_WARM_UP_CALLS):
                call(self.inputs[i % len(self.inputs)])
        self.stream.synchronize()
        if not self._launches:
            self._launches = self._launches_for(self._timed_us(call, 4))
        try:
            self._graphs[name] = self._captured(call)
        except Exception:  # noqa: BLE001 - whatever a call does that a graph can't hold, it can still be called
            self.check_device()
            self._loops[name] = call
            return EAGER_TIMED
        return GRAPH

    def _launches_for(self, us: float) -> int:
        wanted = max(self.policy.min_launches, len(self.inputs), math.ceil(self.policy.min_graph_us / max(us, 1.0)))
        # Whole rotations, so that every set of inputs is as cold as the others.
        return max(1, min(_MAX_LAUNCHES, wanted) // len(self.inputs)) * len(self.inputs)

    def _captured(self, call: Call) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Results that a call makes rotate like those that are given: one reused buffer would stay in the cache.
        kept: deque[Tensor] = deque(maxlen=len(self.inputs))
        with torch.no_grad(), torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(self._launches):
                    kept.append(call(self.inputs[i % len(self.inputs)]))
            finally:
                graph.capture_end()
            graph.replay()
        self.stream.synchronize()
        return graph

    def _timed_us(self, call: Call, launches: int, head_start: int = 0) -> float:
        """Microseconds a launch of a loop of calls between two events."""
        start, end = _events()
        with torch.no_grad(), torch.cuda.stream(self.stream):
            if head_start:
                torch.cuda._sleep(head_start)  # type: ignore[no-untyped-call]
            start.record()
            for i in range(launches):
                call(self.inputs[i % len(self.inputs)])
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / launches

    def sample_us(self, name: str) -> float:
        if name in self._loops:
            return self._timed_us(self._loops[name], self._launches, _CALL_CYCLES * self._launches)
        start, end = _events()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            self._graphs[name].replay()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / self._launches

    def host_us(self, call: Call, us: float) -> float:
        calls = min(100, max(10, int(_HOST_ROUND_US / max(us, 1.0))))
        samples, inputs = [], self.inputs[0]
        # As everywhere here: another mode would make a compiled function compile again.
        with torch.no_grad():
            for _ in range(_HOST_ROUNDS):
                torch.cuda.synchronize(self.device)
                start = time.perf_counter()
                for _ in range(calls):
                    call(inputs)
                samples.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize(self.device)
        return median(samples)

    def conditions(self) -> dict[str, float]:
        return device_conditions(self._uuid)


def _events() -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end


def settle_clocks(device: torch.device) -> None:
    """Matrix products until the clocks have come up from idle."""
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    end = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize(device)
