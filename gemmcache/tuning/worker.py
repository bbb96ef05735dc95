"""The process that owns the GPU while tuning. It dies with a candidate that kills it; the parent goes on.

Protocol over a pipe, each message a tuple: the parent sends `Task`s and None to stop; the worker answers
("environment", Environment), then for each task any number of ("start", key) and one of ("outcome", Outcome),
("failed", text) for a problem that can't be measured; ("lost", text) when the device's context is gone, or
("broken", text) after an error that nobody foresaw, and the worker ends.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gemmcache.environment import Toolchain
from gemmcache.errors import DeviceError, GemmcacheError, MeasurementError
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.records.interface import MeasurementPolicy
from gemmcache.tuning.interface import Candidate
from gemmcache.tuning.search import search


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to measure, with the kernels' shared object that holds its candidates."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    #: Digest of the kernel that serves the problem now, if it is among the candidates.
    incumbent: str | None
    policy: MeasurementPolicy
    #: Path of the linked shared object, the digest it must have, and the CUDA major it was compiled for.
    library: str
    library_digest: str
    cuda_major: int


def serve(pipe: Connection, device: int, toolchain: Toolchain) -> None:
    """Body of the worker process on CUDA `device`. Returns when told to stop or when the device is lost."""
    # The parent handles the keyboard; an interrupt must not kill a measurement half way through a message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        host = _Host(device, toolchain)
    except GemmcacheError as error:
        pipe.send(("lost", error.message))
        return
    pipe.send(("environment", host.environment))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            return
        try:
            outcome = host.measure(task, lambda key: pipe.send(("start", key)))
        except DeviceError as error:
            pipe.send(("lost", str(error)))
            return
        except MeasurementError as error:
            pipe.send(("failed", str(error)))
        except Exception:  # noqa: BLE001 - the parent reports it; nothing more is measured in an unknown state
            pipe.send(("broken", traceback.format_exc(limit=-4)))
            return
        else:
            pipe.send(("outcome", outcome))


class _Host:
    """What outlives a task: loaded modules and the inputs of the last family."""

    def __init__(self, device: int, toolchain: Toolchain) -> None:
        import torch

        from gemmcache.environment import detect_environment

        self.environment = detect_environment(toolchain, device)
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        self.modules: dict[str, Any] = {}
        self.inputs: Any = None
        _settle_clocks(self.device)

    def _functions(self, task: Task) -> dict[str, Callable[..., Any]]:
        from gemmcache.bundle import memory
        from gemmcache.bundle.interface import function_name
        from gemmcache.codec import bytes_digest
        from gemmcache.runtime.native import load_module

        if not task.candidates:
            return {}
        if task.library_digest not in self.modules:
            data = Path(task.library).read_bytes()
            if bytes_digest(data) != task.library_digest:
                raise DeviceError(f"{task.library} changed while tuning")
            self.modules[task.library_digest] = load_module(
                task.library_digest, lambda: memory.sealed_copy([data], len(data)), task.cuda_major
            )
        module = self.modules[task.library_digest]
        return {c.kernel: module.function(function_name(c.kernel)) for c in task.candidates}

    def _inputs(self, family: ProblemFamily, task: Task) -> Any:
        import torch

        from gemmcache.tuning.bench import FamilyInputs, input_sets

        if self.inputs is None or self.inputs.family != family:
            self.inputs = None
            torch.cuda.empty_cache()
            l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            sets = input_sets(family.at(1), l2, task.policy.l2_multiple)
            self.inputs = FamilyInputs(family, sets, self.device, task.policy.seed)
        return self.inputs

    def measure(self, task: Task, notify: Callable[[str], None]) -> Any:
        import torch

        from gemmcache.tuning.bench import GpuBench

        try:
            bench = GpuBench(
                task.problem, self._inputs(task.problem.family, task), self._functions(task), task.policy, self.device
            )
            return search(bench, task.candidates, task.policy, notify, task.incumbent)
        except torch.OutOfMemoryError as error:
            raise MeasurementError(f"{task.problem} does not fit in device memory: {error}") from error


def _settle_clocks(device: Any, seconds: float = 1.5) -> None:
    """Matrix products until the clocks have come up from idle."""
    import time

    import torch

    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize(device)
