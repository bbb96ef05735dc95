"""Choosing winners: ties, broken timers, noise."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.errors import MeasurementError
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import FLAGGED, KERNEL, LIBRARY, OK, Trial
from gemmcache.tuning.interface import Outcome
from gemmcache.tuning.samples import flaws, floor_us, ratio_interval
from gemmcache.tuning.verdict import choose, conclude
from tests.fakes import ENVIRONMENT, H200, POLICY, candidate

PROBLEM = ProblemFamily.of(4096, 4096).at(16)
CONFIGS = [candidate(i).config for i in range(4)]
ORDER = {config: i for i, config in enumerate(CONFIGS)}


def around(us, spread=0.0, rounds=9, seed=0):
    generator = random.Random(seed)
    return tuple(us * (1 + spread * generator.uniform(-1, 1)) for _ in range(rounds))


def record_of(times, baseline, incumbent=None):
    trials = tuple(Trial(config, OK, samples, 0.001) for config, samples in zip(CONFIGS, times, strict=False))
    return conclude(
        PROBLEM,
        ENVIRONMENT,
        POLICY,
        Outcome(trials, tuple(t.config for t in trials), baseline, (), len(trials)),
        order=ORDER,
        baseline="cublas",
        measured_at="2026-01-01T00:00:00Z",
        incumbent=incumbent,
    )


def test_clear_winner_is_chosen_and_ranked_first():
    record = record_of([around(12), around(10), around(15)], around(11))
    assert record.choice == KERNEL
    assert [t.config for t in record.trials] == [CONFIGS[1], CONFIGS[0], CONFIGS[2]]
    assert record.speedup == pytest.approx(1.1)


@pytest.mark.parametrize(("calm_us", "choice"), [(10.9, KERNEL), (11.1, LIBRARY)])
def test_who_wins_under_load_and_loses_in_calm_goes_to_the_library(calm_us, choice):
    rounds, calm = 20, POLICY.calm_rounds
    record = record_of([around(10, rounds=rounds) + around(calm_us, rounds=calm)], around(11, rounds=rounds + calm))
    assert record.choice == choice


def test_an_incumbent_that_is_slower_under_load_is_not_kept_for_its_calm_rounds():
    rounds, calm = POLICY.decision_rounds, POLICY.calm_rounds
    library = (100.0, 100.0) + (101.0,) * (rounds - 2) + (80.0,) * calm
    held = (99.0, 99.0, 99.9) + (103.0,) * (rounds - 3) + (79.9,) * calm
    assert record_of([held], library, incumbent=CONFIGS[0]).choice == LIBRARY


def test_a_trial_without_calm_samples_can_not_win_where_they_are_asked_for():
    trials = (Trial(CONFIGS[0], OK, around(10, rounds=9), 0.001),)
    assert choose(trials, (CONFIGS[0],), around(11, rounds=9 + POLICY.calm_rounds), POLICY) is None


def test_a_policy_without_calm_rounds_does_not_look_for_them():
    samples = around(10, rounds=20) + around(11.1, rounds=5)
    trials = (Trial(CONFIGS[0], OK, samples, 0.001),)
    policy = replace(POLICY, version=2)
    assert policy.calm_rounds == 0
    assert choose(trials, (CONFIGS[0],), around(11, rounds=25), policy) == CONFIGS[0]


def test_slower_than_library_is_a_library_win_with_its_trials_kept():
    record = record_of([around(12), around(13)], around(11))
    assert record.choice == LIBRARY
    assert record.winner is None
    assert record.speedup == 1.0
    assert len(record.trials) == 2


def test_within_the_tie_margin_the_library_wins():
    assert record_of([around(10.0)], around(10.04)).choice == LIBRARY
    assert record_of([around(10.0)], around(10.06)).choice == KERNEL


def test_a_gain_that_noise_could_explain_goes_to_the_library():
    noisy = tuple(10.0 * f for f in (0.7, 1.4, 0.72, 1.35, 0.99, 1.3, 0.75, 1.2, 0.71))
    assert record_of([noisy], around(10.2)).choice == LIBRARY
    assert record_of([around(9.9)], around(10.2)).choice == KERNEL


def test_within_noise_of_the_incumbent_the_incumbent_stays():
    times = [around(10.00), around(10.03)]
    assert record_of(times, around(12), incumbent=CONFIGS[1]).trials[0].config == CONFIGS[1]
    assert record_of(times, around(12)).trials[0].config == CONFIGS[0]


def test_an_incumbent_within_noise_of_the_library_stays():
    assert record_of([around(11.97)], around(12), incumbent=CONFIGS[0]).choice == KERNEL
    assert record_of([around(11.97)], around(12)).choice == LIBRARY


def test_who_did_not_meet_the_library_in_the_decision_can_not_win():
    trials = tuple(Trial(config, OK, around(us), 0.001) for config, us in zip(CONFIGS, (10.0, 5.0), strict=False))
    record = conclude(
        PROBLEM,
        ENVIRONMENT,
        POLICY,
        Outcome(trials, (CONFIGS[0],), around(11), (), 2),
        order=ORDER,
        baseline="cublas",
        measured_at="2026-01-01T00:00:00Z",
    )
    assert record.trials[0].config == CONFIGS[0]


def test_an_incumbent_that_lost_its_lead_goes():
    times = [around(10.0), around(10.5)]
    assert record_of(times, around(12), incumbent=CONFIGS[1]).trials[0].config == CONFIGS[0]


def test_an_incumbent_slower_than_the_library_is_not_kept():
    assert record_of([around(12.0)], around(11.99), incumbent=CONFIGS[0]).choice == LIBRARY


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_broken_sample_never_wins_and_is_flagged(bad):
    broken = (*around(1.0, rounds=8), bad)
    record = record_of([broken, around(10)], around(11))
    assert record.trials[0].config == CONFIGS[1]
    flagged = next(t for t in record.trials if t.config == CONFIGS[0])
    assert flagged.status == FLAGGED
    assert flagged.detail
    assert all(s > 0 for s in flagged.samples_us)


def test_one_outlier_neither_wins_nor_loses():
    fast_once = (0.01, *around(12, rounds=8))
    slow_once = (1000.0, *around(10, rounds=8))
    record = record_of([fast_once, slow_once], around(11))
    assert record.trials[0].config == CONFIGS[1]


def test_impossibly_fast_is_flagged():
    big = ProblemFamily.of(8192, 8192).at(8192)
    floor = floor_us(big, H200)
    assert 0 < floor < 2 * 8192**3 / 990e6
    assert flaws([floor / 2] * 9, floor)
    assert not flaws([floor * 4] * 9, floor)


def test_a_broken_baseline_is_no_record():
    with pytest.raises(MeasurementError, match="library"):
        record_of([around(10)], (*around(11, rounds=8), float("nan")))


@given(
    st.lists(st.lists(st.floats(1.0, 100.0), min_size=9, max_size=9), min_size=1, max_size=4),
    st.lists(st.floats(1.0, 100.0), min_size=9, max_size=9),
    st.sampled_from([None, *CONFIGS]),
)
def test_never_a_kernel_that_its_own_record_shows_slower(times, baseline, incumbent):
    try:
        record = record_of([tuple(t) for t in times], tuple(baseline), incumbent)
    except MeasurementError:
        return
    if record.choice == KERNEL:
        assert record.trials[0].us < record.library_us
        assert record.speedup > 1.0


def test_ratio_interval_covers_the_ratio_and_narrows_with_agreement():
    tight = ratio_interval(around(11, 0.01), around(10, 0.01, seed=1), rounds=400, seed=0)
    loose = ratio_interval(around(11, 0.3), around(10, 0.3, seed=1), rounds=400, seed=0)
    assert tight[0] <= 1.1 <= tight[1] * 1.02
    assert tight[1] - tight[0] < loose[1] - loose[0]
