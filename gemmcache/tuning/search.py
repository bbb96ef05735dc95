"""Searching one problem: every candidate is screened, the best are checked and then timed again, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from gemmcache.errors import MeasurementError
from gemmcache.records.interface import FAILED, FLAGGED, OK, WRONG, MeasurementPolicy, Trial
from gemmcache.tuning.interface import LIBRARY_KEY, Candidate, Outcome, ProblemBench
from gemmcache.tuning.samples import flaws

#: Called before anything is run for a candidate, so that a crash can be laid at its door.
Notify = Callable[[str], None]


def search(
    bench: ProblemBench, candidates: Sequence[Candidate], policy: MeasurementPolicy, notify: Notify = lambda key: None
) -> Outcome:
    """Screens all `candidates`, checks the numbers of the fastest until `policy.finalists` are right, and times
    these and the library in `policy.final_rounds` interleaved rounds.

    Candidates that fail or compute wrong numbers are trials of the outcome as well. Raises `MeasurementError` if
    the library itself fails, `DeviceError` if the device is lost.
    """
    losers: list[Trial] = []
    ready: list[Candidate] = []
    notify(LIBRARY_KEY)
    bench.prepare(LIBRARY_KEY)
    for candidate in candidates:
        notify(candidate.kernel)
        try:
            bench.prepare(candidate.kernel)
        except MeasurementError as error:
            losers.append(Trial(candidate.config, FAILED, detail=error.message))
        else:
            ready.append(candidate)

    screening: dict[str, list[float]] = {c.kernel: [] for c in ready}
    for _ in range(policy.screening_rounds):
        for candidate in ready:
            notify(candidate.kernel)
            screening[candidate.kernel].append(bench.sample_us(candidate.kernel))

    def pace(candidate: Candidate) -> float:
        samples = screening[candidate.kernel]
        # A screening sample that is no time at all ranks first, to be flagged with the finalists' samples.
        return min(samples) if not flaws(samples) else 0.0

    finalists: list[tuple[Candidate, float]] = []
    for candidate in sorted(ready, key=lambda c: (pace(c), c.order)):
        if len(finalists) >= policy.finalists:
            bench.release(candidate.kernel)
            continue
        notify(candidate.kernel)
        found = flaws(screening[candidate.kernel])
        if found:
            losers.append(Trial(candidate.config, FLAGGED, detail="; ".join(found)))
            continue
        worst = bench.error(candidate.kernel)
        if not worst * 1000 <= policy.max_error_milli:
            samples = tuple(s for s in screening[candidate.kernel] if s > 0)
            losers.append(Trial(candidate.config, WRONG, samples, worst, detail=f"relative error {worst:.3g}"))
        else:
            finalists.append((candidate, worst))

    finals: dict[str, list[float]] = {LIBRARY_KEY: [], **{c.kernel: [] for c, _ in finalists}}
    keys = list(finals)
    for turn in range(policy.final_rounds):
        # Every round starts elsewhere, so that no candidate always follows the same one.
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
            notify(key)
            finals[key].append(bench.sample_us(key))

    trials = [Trial(c.config, OK, tuple(finals[c.kernel]), error) for c, error in finalists]
    trials.sort(key=lambda t: median(t.samples_us) if t.samples_us else float("inf"))
    return Outcome(
        trials=(*trials, *losers),
        baseline_us=tuple(finals[LIBRARY_KEY]),
        conditions=tuple(sorted(bench.conditions().items())),
        screened=len(ready),
    )
