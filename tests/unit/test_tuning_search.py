"""The search over one problem: screening, the numeric gate, interleaved finals."""

from __future__ import annotations

import itertools

import pytest

from gemmcache.errors import MeasurementError
from gemmcache.records.interface import FAILED, FLAGGED, OK, WRONG, MeasurementPolicy
from gemmcache.tuning.interface import LIBRARY_KEY
from gemmcache.tuning.search import search
from tests.fakes import POLICY, FakeBench, candidate

CANDIDATES = [candidate(i) for i in range(12)]


def times(**extra):
    base = {c.kernel: 20.0 + i for i, c in enumerate(CANDIDATES)}
    return {LIBRARY_KEY: 25.0, **base, **extra}


def by_config(outcome):
    return {t.config: t for t in outcome.trials}


def test_the_best_of_the_screening_are_timed_again_with_the_library():
    bench = FakeBench(times())
    outcome = search(bench, CANDIDATES, POLICY)
    finals = [t for t in outcome.trials if t.status == OK]
    assert [t.config for t in finals] == [c.config for c in CANDIDATES[: POLICY.finalists]]
    assert all(len(t.samples_us) == POLICY.final_rounds for t in finals)
    assert len(outcome.baseline_us) == POLICY.final_rounds
    assert outcome.screened == len(CANDIDATES)


def test_finals_are_interleaved_and_no_one_always_follows_the_same_neighbour():
    bench = FakeBench(times())
    search(bench, CANDIDATES, POLICY)
    size = POLICY.finalists + 1
    finals = bench.sampled[-size * POLICY.final_rounds :]
    rounds = [finals[i : i + size] for i in range(0, len(finals), size)]
    assert all(sorted(r) == sorted(rounds[0]) for r in rounds)
    assert len({r[0] for r in rounds}) == size


def test_fast_and_wrong_loses_and_its_error_is_kept():
    wrong = CANDIDATES[5]
    bench = FakeBench(times(**{wrong.kernel: 1.0}), errors={wrong.kernel: 0.4})
    trial = by_config(search(bench, CANDIDATES, POLICY))[wrong.config]
    assert trial.status == WRONG
    assert trial.error == 0.4
    # Only those that could win are checked: the wrong one and the finalists.
    assert len(bench.checked) == POLICY.finalists + 1


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 0.0101])
def test_every_error_outside_the_policy_is_wrong(error):
    bench = FakeBench(times(), errors={CANDIDATES[0].kernel: error})
    assert by_config(search(bench, CANDIDATES, POLICY))[CANDIDATES[0].config].status == WRONG


def test_a_candidate_that_fails_to_launch_is_a_failed_trial():
    bench = FakeBench(times(), failing=[CANDIDATES[0].kernel])
    outcome = search(bench, CANDIDATES, POLICY)
    assert by_config(outcome)[CANDIDATES[0].config].status == FAILED
    assert CANDIDATES[0].kernel not in bench.sampled


@pytest.mark.parametrize("bad", [0.0, -3.0, float("nan")])
def test_a_broken_timer_in_the_screening_flags_the_candidate(bad):
    broken = CANDIDATES[3]
    bench = FakeBench(times(**{broken.kernel: itertools.chain([bad], itertools.repeat(1.0))}))
    trial = by_config(search(bench, CANDIDATES, POLICY))[broken.config]
    assert trial.status == FLAGGED


def test_the_library_failing_is_an_error():
    with pytest.raises(MeasurementError):
        search(FakeBench(times(), failing=[LIBRARY_KEY]), CANDIDATES, POLICY)


def test_no_candidates_still_times_the_library():
    outcome = search(FakeBench(times()), [], MeasurementPolicy(final_rounds=5))
    assert outcome.trials == ()
    assert len(outcome.baseline_us) == 5


def test_every_run_is_announced_before_it_happens():
    announced = []
    bench = FakeBench(times(), on_prepare=lambda key: announced.append(("prepare", key)))
    search(bench, CANDIDATES[:2], POLICY, lambda key: announced.append(("start", key)))
    for kind, key in announced:
        if kind == "prepare":
            assert announced.index(("start", key)) < announced.index(("prepare", key))
