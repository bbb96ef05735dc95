"""Runs measurement tasks in a worker process, and survives candidates that kill or hang it."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from gemmcache.environment import Environment, Toolchain
from gemmcache.errors import DeviceError, MeasurementError
from gemmcache.records.interface import FAILED, Trial
from gemmcache.tuning.interface import LIBRARY_KEY, Outcome
from gemmcache.tuning.worker import Task, serve

#: Body of a worker process: (pipe, device index, toolchain). Tests put another in its place.
Serve = Callable[[Connection, int, Toolchain], None]

_START_SECONDS = 120.0
_STEP_SECONDS = 60.0
#: A problem on which this many candidates in a row take the worker down is given up.
_MAX_LOSSES = 16


class WorkerExecutor:
    """One worker process on one device; a context manager.

    A candidate during which the worker dies, loses the device or stays silent for `step_s` seconds becomes a
    failed trial; the problem is measured again without it in a fresh worker.
    """

    def __init__(
        self, device: int, toolchain: Toolchain, *, body: Serve = serve, step_s: float = _STEP_SECONDS
    ) -> None:
        self.device, self.toolchain, self._body, self._step_s = device, toolchain, body, step_s
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._environment: Environment | None = None

    def __enter__(self) -> WorkerExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pipe is not None and self._process is not None and self._process.is_alive():
            with contextlib.suppress(OSError, ValueError):
                self._pipe.send(None)
            self._process.join(5)
        self._stop()

    @property
    def environment(self) -> Environment:
        """The worker's environment; starts the worker if need be. Raises `DeviceError` if it can't start."""
        self._start()
        if self._environment is None:
            raise DeviceError("the tuning worker did not report its environment")
        return self._environment

    def _start(self) -> Connection:
        if self._pipe is not None and self._process is not None and self._process.is_alive():
            return self._pipe
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=self._body, args=(theirs, self.device, self.toolchain), daemon=True, name="gemmcache-tune"
        )
        self._process.start()
        theirs.close()
        self._pipe = ours
        message = self._receive(_START_SECONDS)
        if message is None or message[0] != "environment":
            text = message[1] if message else "it died or hung"
            self._stop()
            raise DeviceError(
                f"the tuning worker did not start: {text}",
                remedy="tune on a machine with an NVIDIA GPU; build --target needs none",
            )
        if isinstance(message[1], Environment):
            self._environment = message[1]
        return ours

    def _receive(self, seconds: float) -> tuple[str, object] | None:
        """The next message, None if the worker is dead or silent."""
        if self._pipe is None:
            return None
        try:
            if not self._pipe.poll(seconds):
                return None
            message: tuple[str, object] = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return message

    def _stop(self) -> None:
        if self._process is not None:
            if self._process.is_alive():
                self._process.kill()
            self._process.join(10)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _post_mortem(self) -> str:
        """What became of a worker that stopped answering."""
        if self._process is None:
            return "the worker is gone"
        # Its end of the pipe closes a moment before the process can be reaped.
        self._process.join(1)
        return "hung" if self._process.is_alive() else f"killed the worker (exit code {self._process.exitcode})"

    def run(self, task: Task) -> Outcome:
        """Measures one task. Raises `MeasurementError` if the problem can't be measured, `DeviceError` if no
        worker stays alive even without candidates."""
        lost: list[Trial] = []
        remaining = task
        restarted = False
        while True:
            pipe = self._start()
            key: str | None = None
            # Of a worker that died just now, the next `_receive` tells.
            with contextlib.suppress(OSError):
                pipe.send(remaining)
            while True:
                message = self._receive(self._step_s)
                if message is None or message[0] == "lost":
                    break
                if message[0] == "start":
                    key = str(message[1])
                elif message[0] == "failed":
                    raise MeasurementError(str(message[1]))
                elif message[0] == "broken":
                    self._stop()
                    raise MeasurementError(f"{task.problem}: the worker failed: {message[1]}")
                elif isinstance(message[1], Outcome):
                    return replace(message[1], trials=(*message[1].trials, *lost))
            reason = self._post_mortem() if message is None else str(message[1])
            self._stop()
            if key is None and not restarted:
                # It died before this task did anything: of what came before, or killed from outside.
                restarted = True
                continue
            culprit = next((c for c in remaining.candidates if c.kernel == key), None)
            if culprit is None:
                what = "the library's own run failed" if key == LIBRARY_KEY else "the worker does not stay alive"
                raise DeviceError(f"{task.problem}: {what}: {reason}")
            lost.append(Trial(culprit.config, FAILED, detail=reason[:500]))
            if len(lost) > _MAX_LOSSES:
                raise MeasurementError(f"{task.problem}: {len(lost)} candidates took the worker down, giving up")
            remaining = replace(
                remaining, candidates=tuple(c for c in remaining.candidates if c.kernel != culprit.kernel)
            )
