"""One problem after another, all peers on each: prepare under a time limit, check, and time in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gemmcache.errors import DeviceError, GemmcacheError
from gemmcache.problem import Problem
from gemmcache.tuning.samples import flaws
from tools.peers.interface import FAILED, OK, TIMEOUT, UNCOVERED, WRONG, Bench, Call, Cell, Peer, Row
from tools.peers.watchdog import PeerTimeout, time_limit

#: A peer that hung this often is not asked again.
MAX_TIMEOUTS = 2
_DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. `limit_s` is for each peer's preparation of a problem, `budget_s` for the whole run."""

    rounds: int = 11
    limit_s: float = 180.0
    budget_s: float = float("inf")
    #: Largest relative error of a right result.
    max_error: float = 0.01


#: Prepares and runs a peer on a problem in a process of its own; returns what went wrong there, or None.
Probe = Callable[[Peer, Problem], str | None]


@dataclass(slots=True)
class Runner:
    """Measures problems with `peers`. Bench, clock and probe are given, so that a test needs no device."""

    peers: Sequence[Peer]
    open_bench: Callable[[Problem], Bench]
    settings: Settings = field(default_factory=Settings)
    probe: Probe | None = None
    #: Called with each row that is complete.
    on_row: Callable[[Row], None] = lambda row: None
    #: Called before the process is ended because a peer hangs beyond help.
    on_hang: Callable[[], None] | None = None
    clock: Callable[[], float] = time.monotonic
    rows: list[Row] = field(default_factory=list)
    #: Problems that were not begun.
    left_out: list[Problem] = field(default_factory=list)
    #: Why the run ended before its time, empty if it did not.
    stopped: str = ""
    #: Whether it ended because the device's context was lost.
    lost: bool = False
    _absent: dict[str, str] = field(default_factory=dict)
    _timeouts: dict[str, int] = field(default_factory=dict)

    def run(self, problems: Iterable[Problem]) -> list[Row]:
        """A row a problem, in order. What did not fit into the budget, and what was left when the device was lost, is
        in `left_out`."""
        self.left_out = list(problems)
        for peer in self.peers:
            reason = peer.available()
            if reason:
                self._absent[peer.name] = reason
        begun = self.clock()
        while self.left_out:
            # A run that is cut off from outside loses more than the problem that would not have fitted.
            longest = max((row.seconds for row in self.rows), default=0.0)
            if self.clock() - begun + longest > self.settings.budget_s:
                self.stopped = f"the budget of {self.settings.budget_s:g} s is spent"
                break
            row = Row(self.left_out.pop(0), ranked=frozenset(peer.name for peer in self.peers if peer.ranked))
            # Before it is measured: an interrupt keeps what there is of it.
            self.rows.append(row)
            start = self.clock()
            try:
                self._measure(row)
            except DeviceError as error:
                row.failed = self.stopped = str(error)
                self.lost = True
            except RuntimeError as error:
                # A problem that can't be measured, or torch's own for inputs that do not fit into the device's memory.
                row.failed = describe(error)
            except BaseException:
                row.failed = self.stopped = "interrupted"
                raise
            row.seconds = self.clock() - start
            self.on_row(row)
            if self.stopped:
                break
        return self.rows

    def _measure(self, row: Row) -> None:
        bench = self.open_bench(row.problem)
        calls: dict[str, Call] = {}
        for peer in self.peers:
            cell, call = self._prepare(peer, row.problem, bench)
            row.cells[peer.name] = cell
            if call is not None:
                calls[peer.name] = call
        self._sample(row, bench, list(calls))
        row.conditions = bench.conditions()
        for peer in self.peers:
            us = row.cells[peer.name].us
            if peer.name in calls and us is not None:
                self._host(peer, row, bench, calls[peer.name], us)

    def _refused(self, peer: Peer, problem: Problem) -> Cell | None:
        """The cell of a peer that is not even tried."""
        if peer.name in self._absent:
            return Cell(UNCOVERED, self._absent[peer.name])
        if self._timeouts.get(peer.name, 0) >= MAX_TIMEOUTS:
            return Cell(TIMEOUT, f"not tried again after {MAX_TIMEOUTS} time-outs")
        reason = peer.uncovered(problem)
        return Cell(UNCOVERED, reason) if reason else None

    def _prepare(self, peer: Peer, problem: Problem, bench: Bench) -> tuple[Cell, Call | None]:
        """The peer's cell without samples, and what to time if there is something to be timed."""
        refused = self._refused(peer, problem)
        if refused is not None:
            return refused, None
        died = self.probe(peer, problem) if self.probe else None
        if died is not None:
            return Cell(FAILED, f"in a process of its own: {died}"), None
        try:
            with time_limit(self.settings.limit_s, self.on_hang):
                start = self.clock()
                call = peer.prepare(problem, bench.inputs)
                if call is None:
                    return Cell(UNCOVERED, "not covered, as it found when it prepared"), None
                result = bench.run(call)
                cold = self.clock() - start
                distance = bench.error(peer.comparable(problem, result, bench.inputs[0]))
                del result
                mode = bench.ready(peer.name, call)
        except PeerTimeout as timeout:
            self._timeouts[peer.name] = self._timeouts.get(peer.name, 0) + 1
            bench.check_device()
            return Cell(TIMEOUT, str(timeout)), None
        except Exception as error:  # noqa: BLE001 - a peer is code of others, and the others go on
            # Whatever was raised: only the device can tell whether it is lost.
            bench.check_device()
            return Cell(FAILED, describe(error)), None
        right = distance <= self.settings.max_error
        detail = peer.note(problem) if right else f"relative error {distance:.3g}"
        return Cell(OK if right else WRONG, detail, mode=mode, error=distance, cold_s=cold), call

    def _sample(self, row: Row, bench: Bench, names: list[str]) -> None:
        """Interleaved rounds over all peers, in turns from either end; the first round only warms up."""
        alive = list(names)
        for turn in range(self.settings.rounds + 1):
            for name in alive[:] if turn % 2 else alive[::-1]:
                cell = row.cells[name]
                try:
                    with time_limit(self.settings.limit_s, self.on_hang):
                        us = bench.sample_us(name)
                except PeerTimeout as timeout:
                    cell.status, cell.detail = TIMEOUT, str(timeout)
                except Exception as error:  # noqa: BLE001 - as in _prepare
                    cell.status, cell.detail = FAILED, describe(error)
                else:
                    if turn:
                        cell.samples_us.append(us)
                    continue
                bench.check_device()
                alive.remove(name)
        for name in alive:
            found = flaws(row.cells[name].samples_us)
            if found:
                row.cells[name].status = FAILED
                row.cells[name].detail = f"samples that can't be trusted: {', '.join(found)}"

    def _host(self, peer: Peer, row: Row, bench: Bench, call: Call, us: float) -> None:
        try:
            with time_limit(self.settings.limit_s, self.on_hang):
                row.cells[peer.name].host_us = bench.host_us(peer.host_call(row.problem, call), us)
        except PeerTimeout:
            bench.check_device()
        except Exception as error:  # noqa: BLE001 - as in _prepare; the device time stands
            bench.check_device()
            row.cells[peer.name].detail += f" (host time: {describe(error)})"


def describe(error: BaseException) -> str:
    """An error in one short line: compilers put pages into theirs."""
    text = " ".join(str(error).split()) or "no message"
    text = text if isinstance(error, GemmcacheError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= _DETAIL_CHARACTERS else text[: _DETAIL_CHARACTERS - 3] + "..."
