"""The search over one problem: screening, the numeric gate, interleaved finals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gemmcache.errors import MeasurementError
from gemmcache.records.interface import FAILED, FLAGGED, OK, WRONG, MeasurementPolicy
from gemmcache.tuning.interface import LIBRARY_KEY
from gemmcache.tuning.search import search
from tests.fakes import POLICY, FakeBench, candidate

CANDIDATES = [candidate(i) for i in range(12)]
DECISION = POLICY.decision_rounds + POLICY.calm_rounds


def times(**extra):
    base = {c.kernel: 20.0 + i / 2 for i, c in enumerate(CANDIDATES)}
    return {LIBRARY_KEY: 25.0, **base, **extra}


def by_config(outcome):
    return {t.config: t for t in outcome.trials}


def test_the_best_of_the_screening_are_timed_again():
    outcome = search(FakeBench(times()), CANDIDATES, POLICY)
    finals = [t for t in outcome.trials if t.status == OK]
    assert [t.config for t in finals] == [c.config for c in CANDIDATES[: POLICY.finalists]]
    assert outcome.contenders == (CANDIDATES[0].config,)
    # The challenger's samples are those of the decision, paired with the library's.
    assert [len(t.samples_us) for t in finals] == [DECISION] + [POLICY.final_rounds] * 7
    assert len(outcome.baseline_us) == DECISION
    assert outcome.screened == len(CANDIDATES)


def test_rounds_are_interleaved_warmed_up_and_no_one_always_follows_the_same_neighbour():
    bench = FakeBench(times())
    search(bench, CANDIDATES, POLICY)
    screened, size = POLICY.screening_rounds * len(CANDIDATES), POLICY.finalists
    finals = bench.sampled[screened : screened + size * (POLICY.final_rounds + 1)]
    rounds = [finals[i : i + size] for i in range(0, len(finals), size)]
    assert all(sorted(r) == sorted(rounds[0]) for r in rounds)
    assert len({r[0] for r in rounds}) == min(size, POLICY.final_rounds + 1)
    decision = bench.sampled[screened + len(finals) :]
    assert len(decision) == 2 * (POLICY.decision_rounds + 1 + POLICY.calm_rounds + 1)
    assert set(decision) == {LIBRARY_KEY, CANDIDATES[0].kernel}


def test_a_long_problem_has_calm_rounds_with_a_rest_before_each_sample():
    slow = {key: 10 * us for key, us in times().items()}
    bench = FakeBench(slow)
    search(bench, CANDIDATES, POLICY)
    # Two kinds of samples, and a round that is not counted.
    assert bench.rested == list(range(len(bench.sampled)))[-2 * (POLICY.calm_rounds + 1) :]
    bench = FakeBench(times())
    search(bench, CANDIDATES, POLICY)
    assert bench.rested == []


@pytest.mark.parametrize("nth", range(1, 30))
def test_a_contender_that_fails_at_whatever_sample_is_a_failed_trial(nth):
    """In the screening, the finals, the decision under load or in calm."""

    class Failing(FakeBench):
        taken = 0

        def sample_us(self, key):
            if key == CANDIDATES[0].kernel:
                self.taken += 1
                if self.taken >= nth:
                    raise MeasurementError("it hung")
            return super().sample_us(key)

    outcome = search(Failing(times()), CANDIDATES[:1], POLICY)
    samples = POLICY.screening_rounds + 1 + POLICY.final_rounds + 1 + POLICY.decision_rounds + 1 + POLICY.calm_rounds
    assert [t.status for t in outcome.trials] == [FAILED if nth <= samples else OK]
    assert len(outcome.baseline_us) == DECISION


def test_a_policy_without_calm_rounds_ends_with_the_loaded_ones():
    bench = FakeBench(times())
    outcome = search(bench, CANDIDATES, replace(POLICY, calm_rounds=0))
    assert len(outcome.baseline_us) == POLICY.decision_rounds


def test_the_hopeless_are_not_screened_again():
    slow = CANDIDATES[9]
    bench = FakeBench(times(**{slow.kernel: 60.0}))
    search(bench, CANDIDATES, POLICY)
    assert bench.sampled.count(slow.kernel) == 1
    assert bench.sampled.count(CANDIDATES[10].kernel) == POLICY.screening_rounds


def test_the_winner_of_the_finals_is_judged_on_fresh_samples():
    lucky = CANDIDATES[0]
    counted = POLICY.screening_rounds + 1 + POLICY.final_rounds
    luck = itertools.chain([10.0] * counted, itertools.repeat(30.0))
    outcome = search(FakeBench(times(**{lucky.kernel: luck})), CANDIDATES, POLICY)
    assert outcome.contenders == (lucky.config,)
    assert by_config(outcome)[lucky.config].us == 30.0


def test_the_incumbent_is_in_the_decision_however_it_did_in_the_screening():
    incumbent = CANDIDATES[11]
    outcome = search(FakeBench(times()), CANDIDATES, POLICY, incumbent=incumbent.kernel)
    assert outcome.contenders == (CANDIDATES[0].config, incumbent.config)
    assert len(by_config(outcome)[incumbent.config].samples_us) == DECISION


def test_of_tied_finalists_the_simplest_is_the_challenger():
    outcome = search(FakeBench(times(**{CANDIDATES[4].kernel: 19.95})), CANDIDATES, POLICY)
    assert outcome.contenders == (CANDIDATES[0].config,)
    outcome = search(FakeBench(times(**{CANDIDATES[4].kernel: 19.0})), CANDIDATES, POLICY)
    assert outcome.contenders == (CANDIDATES[4].config,)


@pytest.mark.parametrize("where", ["sample", "error"])
def test_a_candidate_that_fails_later_costs_itself_only(where):
    broken = CANDIDATES[2]
    bench = FakeBench(times())
    if where == "sample":
        bench.failing_later = (broken.kernel,)
    else:
        bench.error = lambda key: 0.001 if key != broken.kernel else (_ for _ in ()).throw(MeasurementError("no"))
    outcome = search(bench, CANDIDATES, POLICY)
    assert by_config(outcome)[broken.config].status == FAILED
    assert outcome.contenders == (CANDIDATES[0].config,)
    assert sum(t.status == OK for t in outcome.trials) == POLICY.finalists


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
    outcome = search(FakeBench(times()), [], MeasurementPolicy(decision_rounds=5, calm_rounds=2))
    assert outcome.trials == ()
    assert outcome.contenders == ()
    assert len(outcome.baseline_us) == 7


def test_every_run_is_announced_before_it_happens():
    announced = []
    bench = FakeBench(times(), on_prepare=lambda key: announced.append(("prepare", key)))
    search(bench, CANDIDATES[:2], POLICY, lambda key: announced.append(("start", key)))
    for kind, key in announced:
        if kind == "prepare":
            assert announced.index(("start", key)) < announced.index(("prepare", key))
