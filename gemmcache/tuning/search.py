"""Searching one problem: screening of all candidates, numeric gate, finals, and a decision against the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from gemmcache.errors import MeasurementError
from gemmcache.records.interface import FAILED, FLAGGED, OK, WRONG, MeasurementPolicy, Trial
from gemmcache.tuning.interface import LIBRARY_KEY, Candidate, Outcome, ProblemBench
from gemmcache.tuning.samples import flaws

#: A candidate this many times slower than the best at first sight is not screened again.
_REACH = 1.5

#: Called before anything is run for a candidate, so that a crash can be laid at its door.
Notify = Callable[[str], None]


def search(
    bench: ProblemBench,
    candidates: Sequence[Candidate],
    policy: MeasurementPolicy,
    notify: Notify = lambda key: None,
    incumbent: str | None = None,
) -> Outcome:
    """Screens all `candidates`; checks the numbers of the fastest until `policy.finalists` are right, and of the
    `incumbent` (a kernel digest) in any case; times these in interleaved rounds; then times the best of them, the
    incumbent and the library once more, in fresh rounds of their own: whoever won the finals was also lucky there.
    The last of these rounds are calm ones, after pauses.

    Candidates that fail or compute wrong numbers are trials of the outcome as well. Raises `MeasurementError` if
    the library itself fails, `DeviceError` if the device is lost.
    """
    race = _Race(bench, policy, notify)
    race.prepare(candidates)
    race.screen()
    race.qualify(incumbent)
    race.rounds([c.kernel for c in race.running], policy.final_rounds)
    contenders = race.contenders(incumbent)
    baseline = race.decide([LIBRARY_KEY, *(c.kernel for c in contenders)])
    running = {c.kernel for c in race.running}
    trials = [
        Trial(c.config, OK, tuple(race.samples[c.kernel]), race.errors[c.kernel])
        for c in race.running
        if race.samples[c.kernel]
    ]
    trials.sort(key=lambda t: median(t.samples_us))
    return Outcome(
        trials=(*trials, *race.losers),
        contenders=tuple(c.config for c in contenders if c.kernel in running),
        baseline_us=tuple(baseline),
        conditions=tuple(sorted(bench.conditions().items())),
        screened=race.screened,
    )


class _Race:
    """The candidates still running, their samples of the latest rounds, and the trials of those that are out."""

    def __init__(self, bench: ProblemBench, policy: MeasurementPolicy, notify: Notify) -> None:
        self.bench, self.policy, self.notify = bench, policy, notify
        self.running: list[Candidate] = []
        self.losers: list[Trial] = []
        self.samples: dict[str, list[float]] = {}
        self.errors: dict[str, float] = {}
        self.screened = 0

    def prepare(self, candidates: Iterable[Candidate]) -> None:
        self.notify(LIBRARY_KEY)
        self.bench.prepare(LIBRARY_KEY)
        for candidate in candidates:
            self.notify(candidate.kernel)
            try:
                self.bench.prepare(candidate.kernel)
            except MeasurementError as error:
                self.losers.append(Trial(candidate.config, FAILED, detail=error.message))
            else:
                self.running.append(candidate)
        self.screened = len(self.running)

    def screen(self) -> None:
        """Times every candidate once, and those within reach of the best again; a broken timer is out."""
        first = self.rounds([c.kernel for c in self.running], min(1, self.policy.screening_rounds), warm_up=False)
        self._flag_broken()
        best = min((min(first[c.kernel]) for c in self.running if first[c.kernel]), default=0.0)
        close = [c.kernel for c in self.running if min(first[c.kernel]) <= _REACH * best]
        again = self.rounds(close, self.policy.screening_rounds - 1, warm_up=False)
        self.samples.update({key: first[key] + again.get(key, []) for key in first})
        self._flag_broken()

    def _flag_broken(self) -> None:
        for candidate in list(self.running):
            found = flaws(self.samples[candidate.kernel])
            if found:
                self._out(candidate, Trial(candidate.config, FLAGGED, detail="; ".join(found)))

    def qualify(self, incumbent: str | None) -> None:
        """Leaves the fastest candidates with right numbers, and the incumbent if its numbers are right."""
        qualified = 0
        for candidate in sorted(self.running, key=lambda c: (min(self.samples[c.kernel]), c.order)):
            if qualified >= self.policy.finalists and candidate.kernel != incumbent:
                self.running.remove(candidate)
                self.bench.release(candidate.kernel)
                continue
            self.notify(candidate.kernel)
            try:
                error = self.bench.error(candidate.kernel)
            except MeasurementError as refusal:
                self._out(candidate, Trial(candidate.config, FAILED, detail=refusal.message))
                continue
            if not error * 1000 <= self.policy.max_error_milli:
                samples = tuple(self.samples[candidate.kernel])
                detail = f"relative error {error:.3g}"
                self._out(candidate, Trial(candidate.config, WRONG, samples, error, detail=detail))
                continue
            self.errors[candidate.kernel] = error
            qualified += 1

    def contenders(self, incumbent: str | None) -> list[Candidate]:
        """Who meets the library: the simplest of those tied for the best finals, and the incumbent."""
        timed = [c for c in self.running if not flaws(self.samples[c.kernel])]
        if not timed:
            return []
        pace = {c.kernel: median(self.samples[c.kernel]) for c in timed}
        limit = min(pace.values()) * (1 + self.policy.tie_milli / 1000)
        challenger = min((c for c in timed if pace[c.kernel] <= limit), key=lambda c: c.order)
        return [challenger, *(c for c in timed if c.kernel == incumbent and c is not challenger)]

    def decide(self, keys: Sequence[str]) -> list[float]:
        """The library's samples of the deciding rounds, under load and then calm; those of the others are kept."""
        loaded = self.rounds(keys, self.policy.decision_rounds)
        if not self.policy.calm_rounds or not loaded[LIBRARY_KEY]:
            return loaded[LIBRARY_KEY]
        heavy = median(loaded[LIBRARY_KEY]) >= self.policy.heavy_us
        pause = self.policy.pause_ms / 1000 if heavy else 0.0
        running = {LIBRARY_KEY, *(c.kernel for c in self.running)}
        alive = [key for key in keys if key in running]
        calm = self.rounds(alive, self.policy.calm_rounds, pause_s=pause)
        self.samples.update({key: loaded[key] + calm[key] for key in alive})
        return self.samples[LIBRARY_KEY]

    def rounds(
        self, keys: Sequence[str], rounds: int, *, warm_up: bool = True, pause_s: float = 0.0
    ) -> dict[str, list[float]]:
        """Interleaved samples of `keys`, which replace older ones. A round that is not counted goes before, where
        what ran last may have left clocks and caches in another state; every round starts with another key. The
        device rests for `pause_s` seconds before each sample.
        """
        taken: dict[str, list[float]] = {key: [] for key in keys}
        alive = list(keys)
        for turn in range(-1 if warm_up else 0, rounds):
            start = turn % len(alive) if alive else 0
            for key in alive[start:] + alive[:start]:
                self.notify(key)
                try:
                    if pause_s:
                        self.bench.rest(pause_s)
                    sample = self.bench.sample_us(key)
                except MeasurementError as error:
                    if key == LIBRARY_KEY:
                        raise
                    alive.remove(key)
                    candidate = next(c for c in self.running if c.kernel == key)
                    self._out(candidate, Trial(candidate.config, FAILED, detail=error.message))
                    continue
                if turn >= 0:
                    taken[key].append(sample)
        self.samples.update(taken)
        return taken

    def _out(self, candidate: Candidate, trial: Trial) -> None:
        self.running.remove(candidate)
        self.losers.append(trial)
