"""Timing and checking on a real GPU: rotating random inputs, CUDA graph replay, an fp32 reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gemmcache import dtypes, library, reference
from gemmcache.errors import DeviceError, MeasurementError
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.records.interface import MeasurementPolicy
from gemmcache.tuning.interface import LIBRARY_KEY, ProblemBench

_MAX_LAUNCHES = 512
_MAX_SETS = 512
#: An element may be off by this many steps of out's dtype at the size of itself plus that of a typical element.
#: The norm over all of out would not see a column or a tile of zeros.
_LOCAL_STEPS = 8
#: GPU clock cycles of idling before a timed graph, so that its launch is over when the timing starts.
_HEAD_START_CYCLES = 100_000
_LONG_GRAPH_US = 2000
#: Rows of out that are compared with the reference at most; all elements are checked for being written.
_CHECK_ROWS = 512


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end


class FamilyInputs:
    """Weights and epilogue operands of one family of problems, shared by the benches of its ms."""

    def __init__(self, family: ProblemFamily, sets: int, device: torch.device, seed: int) -> None:
        self.family = family
        self.generator = torch.Generator(device=device).manual_seed(seed)
        transposed = family.b_layout == "kn"
        self.weights = [self.random(family.n, family.k, family.b_dtype, device, transposed) for _ in range(sets)]

    def random(
        self, rows: int, columns: int, dtype: str, device: torch.device, transposed: bool = False
    ) -> torch.Tensor:
        """Normal values scaled so that out has unit variance whatever k is; `transposed` has contiguous columns."""
        if transposed:
            # Contiguous columns still start 16 bytes apart.
            ahead = -(-rows // 16) * 16
            return self.random(columns, ahead, dtype, device)[:, :rows].t()
        if dtype == "int8":
            shape = (rows, columns)
            integers: torch.Tensor = torch.randint(
                -8, 8, shape, device=device, dtype=torch.int8, generator=self.generator
            )
            return integers
        scale = self.family.k**-0.25
        if dtypes.SIZES[dtype] == 1:
            wide = torch.randn(rows, columns, device=device, generator=self.generator) * scale
            narrow: torch.Tensor = wide.to(_dtype(dtype))
            return narrow
        data = torch.empty(rows, columns, device=device, dtype=_dtype(dtype))
        return data.normal_(0.0, scale, generator=self.generator)


def input_sets(problem: Problem, l2_bytes: int, multiple: int) -> int:
    """How many input sets make one rotation move `multiple` times the L2 size."""
    return min(_MAX_SETS, max(1, math.ceil(multiple * l2_bytes / problem.min_bytes)))


class GpuBench(ProblemBench):
    """`ProblemBench` on a CUDA device. `functions` maps kernel digests to tvm-ffi functions.

    Memory: `sets` copies of a[M+1, K], b[N, K] and out[M+1, N]. The extra row serves the ragged neighbour above m.
    """

    def __init__(
        self,
        problem: Problem,
        inputs: FamilyInputs,
        functions: Mapping[str, Callable[..., Any]],
        policy: MeasurementPolicy,
        device: torch.device,
    ) -> None:
        family = problem.family
        if family.batch != 1 or family.out_layout != "mn":
            raise MeasurementError(f"{problem}: batches and out layouts other than mn can't be measured yet")
        self.problem, self.functions, self.policy, self.device = problem, functions, policy, device
        self.inputs = inputs
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.sets = min(len(inputs.weights), input_sets(problem, l2, policy.l2_multiple))
        rows = problem.m + 1
        transposed = family.a_layout == "km"
        self.a = [inputs.random(rows, family.k, family.a_dtype, device, transposed) for _ in range(self.sets)]
        self.out = [
            torch.empty(rows, family.out_columns, device=device, dtype=_dtype(family.out_dtype))
            for _ in range(self.sets)
        ]
        self.operands = self._epilogue_operands()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The inputs were made on the current stream.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.launches = 0
        self._launch_us = 0.0
        self._reference: tuple[torch.Tensor, torch.Tensor] | None = None

    def _epilogue_operands(self) -> dict[str, torch.Tensor]:
        family = self.problem.family
        made = {}
        for name in family.epilogue.operands():
            if name == "residual":
                made[name] = self.inputs.random(self.problem.m + 1, family.out_columns, family.out_dtype, self.device)
            elif name == "bias":
                made[name] = self.inputs.random(1, family.n, family.out_dtype, self.device)[0]
            else:
                size = {"scale_a": self.problem.m + 1, "scale_b": family.n}[name]
                if family.epilogue.scale == "tensor":
                    size = 1
                made[name] = torch.rand(size, device=self.device) + 0.5
        return made

    def _rows(self, m: int) -> dict[str, torch.Tensor]:
        """The epilogue operands for the first m rows."""
        cut = {}
        for name, tensor in self.operands.items():
            by_row = name == "residual" or (name == "scale_a" and tensor.numel() > 1)
            cut[name] = tensor[:m] if by_row else tensor
        return cut

    def _run(self, key: str, i: int, m: int) -> None:
        """Launches the candidate on input set `i` with m rows, on the current stream."""
        a, b, out = self.a[i][:m], self.inputs.weights[i], self.out[i][:m]
        operands = self._rows(m)
        if key == LIBRARY_KEY:
            library.library(self.problem.family, a, b, operands, out=out)
        else:
            self.functions[key](a, b, out, *(operands[name] for name in self.problem.family.epilogue.operands()))

    def _guarded(self, key: str, action: Callable[[], None]) -> None:
        """Runs `action` and waits for the device; tells a refused call from a lost device."""
        try:
            action()
            self.stream.synchronize()
        except (ValueError, TypeError) as error:
            raise MeasurementError(f"the kernel refused its arguments: {error}") from error
        except RuntimeError as error:
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as lost:
                raise DeviceError(f"{key[:12]} broke the device's context: {lost}") from lost
            raise MeasurementError(f"the launch failed: {error}") from error

    def prepare(self, key: str) -> None:
        def warm_up() -> None:
            with torch.cuda.stream(self.stream):
                self._run(key, 0, self.problem.m)

        self._guarded(key, warm_up)
        if not self.launches:
            self._launch_us = self._eager_us(key)
            self.launches = self._launches_for(self._launch_us)
        self._guarded(key, lambda: self._capture(key))

    def _launches_for(self, us: float) -> int:
        wanted = max(self.policy.min_launches, self.sets, math.ceil(self.policy.min_graph_us / max(us, 1.0)))
        # Whole rotations, so that every input set is as cold as the others.
        return max(1, min(_MAX_LAUNCHES, wanted) // self.sets) * self.sets

    def _eager_us(self, key: str) -> float:
        start, end = _events()
        with torch.cuda.stream(self.stream):
            start.record()
            for i in range(4):
                self._run(key, i % self.sets, self.problem.m)
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / 4

    def _capture(self, key: str) -> None:
        # Not torch.cuda.graph(): it collects garbage and empties the allocator for each of hundreds of captures.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(self.launches):
                    self._run(key, i % self.sets, self.problem.m)
            finally:
                graph.capture_end()
            if self.launches * self._launch_us < _LONG_GRAPH_US:
                # The first launch of a graph takes longer on the host, which a short graph does not hide.
                graph.replay()
        self.graphs[key] = graph

    def sample_us(self, key: str) -> float:
        start, end = _events()

        def replay() -> None:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
                start.record()
                self.graphs[key].replay()
                end.record()

        self._guarded(key, replay)
        return float(start.elapsed_time(end)) * 1000 / self.launches

    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(row indices, reference rows) of input set 0 with m + 1 rows, in fp32."""
        if self._reference is None:
            family, total = self.problem.family, self.problem.m + 1
            if total <= _CHECK_ROWS:
                rows = torch.arange(total, device=self.device)
            else:
                # The first rows, the last (ragged) ones, and a spread between.
                spread = torch.linspace(0, total - 1, _CHECK_ROWS - 64, device=self.device).long()
                ends = torch.arange(total - 64, total, device=self.device)
                rows = torch.cat([spread[spread < total - 64], ends])
            operands = {
                name: tensor[rows] if name == "residual" or (name == "scale_a" and tensor.numel() > 1) else tensor
                for name, tensor in self.operands.items()
            }
            expected = reference.reference(family, self.a[0][rows], self.inputs.weights[0], operands)
            self._reference = rows, expected
        return self._reference

    def error(self, key: str) -> float:
        rows, expected = self._expected()
        worst = 0.0
        for m in sorted({max(1, self.problem.m - 1), self.problem.m, self.problem.m + 1}):
            out = self.out[0][:m]
            out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-128)
            torch.cuda.synchronize(self.device)

            def launch(m: int = m) -> None:
                with torch.cuda.stream(self.stream):
                    self._run(key, 0, m)

            self._guarded(key, launch)
            if out.is_floating_point() and not bool(torch.isfinite(out.sum(dtype=torch.float32))):
                return float("inf")
            chosen = rows < m
            worst = max(worst, self._difference(out[rows[chosen]], expected[chosen]))
        return worst

    def _difference(self, out: torch.Tensor, expected: torch.Tensor) -> float:
        """The relative error of some rows, infinity if any single element is off by more than rounding explains."""
        if out.is_floating_point():
            size = expected.abs() + expected.square().mean().sqrt()
            # Rounding to out, and that of a sum of k products in fp32, which grows with the root of k.
            sum_steps = math.sqrt(self.problem.family.k) * torch.finfo(torch.float32).eps
            limit = _LOCAL_STEPS * (torch.finfo(out.dtype).eps + sum_steps)
            if bool(((out.float() - expected).abs() > limit * size).any()):
                return float("inf")
        return reference.relative_error(out, expected)

    def conditions(self) -> dict[str, float]:
        return device_conditions(str(torch.cuda.get_device_properties(self.device).uuid))

    def release(self, key: str) -> None:
        self.graphs.pop(key, None)


def device_conditions(uuid: str) -> dict[str, float]:
    """Clocks, power, temperature and throttle reasons through NVML; empty where NVML can't say.

    By UUID: NVML and CUDA may number the devices differently.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return {
            "sm_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "memory_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            "throttle_reasons": float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
    except pynvml.NVMLError:
        return {}
