"""From measured trials to a choice. Pure: no device, no clock.

Ties go to the incumbent, then to the library, then to the simpler config; a kernel whose median is not below the
library's is never chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from gemmcache.environment import Environment
from gemmcache.errors import MeasurementError
from gemmcache.kernels.interface import Config
from gemmcache.problem import Problem
from gemmcache.records.interface import FLAGGED, KERNEL, LIBRARY, OK, MeasurementPolicy, Trial, TuningRecord
from gemmcache.tuning.interface import Outcome
from gemmcache.tuning.samples import flaws, floor_us, ratio_interval


def flag(trial: Trial, floor: float) -> Trial:
    """The trial with status `flagged` and only its sane samples if its samples can't be trusted."""
    if trial.status != OK:
        return trial
    found = flaws(trial.samples_us, floor)
    if not found:
        return trial
    sane = tuple(s for s in trial.samples_us if 0 < s < float("inf"))
    return replace(trial, status=FLAGGED, samples_us=sane, detail="; ".join(found))


def choose(
    trials: tuple[Trial, ...],
    contenders: tuple[Config, ...],
    baseline_us: tuple[float, ...],
    policy: MeasurementPolicy,
    incumbent: Config | None = None,
) -> Config | None:
    """The contender that wins, None for the library.

    The incumbent stays if it beats the library at all and no contender beats it by more than the tie margin. Anyone
    else must beat the library by more than the margin, with the lower bound of the paired ratio's interval above 1.
    Nobody wins who is slower than the library under load, or in the calm rounds, the last ones: a kernel that draws
    less power can win at the power limit alone.
    """
    library = median(baseline_us)
    tie = 1.0 + policy.tie_milli / 1000
    usable = [
        t
        for t in trials
        if t.config in contenders and t.status == OK and t.us < library and _wins_in_both(t, baseline_us, policy)
    ]
    if not usable:
        return None
    best = min(usable, key=lambda t: (t.us, contenders.index(t.config)))
    held = next((t for t in usable if t.config == incumbent), None)
    if held is not None and held.us <= best.us * tie:
        return held.config
    low, _ = ratio_interval(baseline_us, best.samples_us, rounds=policy.bootstrap, seed=policy.seed)
    return best.config if library > best.us * tie and low > 1.0 else None


def _wins_in_both(trial: Trial, baseline_us: tuple[float, ...], policy: MeasurementPolicy) -> bool:
    """Whether the trial is not slower than the library under load, nor in the calm rounds if there were any."""
    if not policy.calm_rounds:
        return True
    if len(trial.samples_us) != len(baseline_us) or len(baseline_us) <= policy.calm_rounds:
        return False
    ratios = [b / t for b, t in zip(baseline_us, trial.samples_us, strict=True)]
    loaded, calm = ratios[: -policy.calm_rounds], ratios[-policy.calm_rounds :]
    return median(loaded) >= 1.0 and median(calm) >= 1.0


def conclude(
    problem: Problem,
    environment: Environment,
    policy: MeasurementPolicy,
    outcome: Outcome,
    *,
    order: Mapping[Config, int],
    baseline: str,
    measured_at: str,
    incumbent: Config | None = None,
) -> TuningRecord:
    """The tuning record of an outcome, winner first. Raises `MeasurementError` if the baseline can't be trusted."""
    floor = floor_us(problem, environment.target)
    found = flaws(outcome.baseline_us, floor)
    if found:
        raise MeasurementError(f"{problem}: the library's timing can't be trusted: {'; '.join(found)}")
    trials = tuple(flag(t, floor) for t in outcome.trials)
    winner = choose(trials, outcome.contenders, outcome.baseline_us, policy, incumbent)
    ranked = sorted(trials, key=lambda t: (t.config != winner, t.status != OK, t.us, order.get(t.config, len(order))))
    return TuningRecord(
        problem=problem,
        environment=environment,
        policy=policy,
        choice=LIBRARY if winner is None else KERNEL,
        trials=tuple(ranked),
        baseline=baseline,
        baseline_us=outcome.baseline_us,
        measured_at=measured_at,
        conditions=outcome.conditions,
    )
