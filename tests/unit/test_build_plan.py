"""Planning a bundle: records, predictions, unique kernels; and that table and loader agree for every m."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmcache.build.plan import Planner, speedup
from gemmcache.build.predict import Predictor, cheapest
from gemmcache.bundle.interface import KERNEL, LIBRARY, PREDICTED, TUNED
from gemmcache.errors import MissingRecordError
from gemmcache.kernels.interface import Config
from gemmcache.kernels.operators import OperatorsFamily
from gemmcache.models.interface import Layer, Workload
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import OK, Trial, TuningRecord
from gemmcache.runtime.dispatch import Dispatcher
from gemmcache.target import TARGETS, Host
from tests.fakes import ENVIRONMENT, POLICY, TOOLCHAIN, MemoryRecords

H200, H20 = TARGETS["h200"], TARGETS["h20"]
FAMILIES = {"operators": OperatorsFamily()}
HOST = Host("x86_64", "x86-64-v3")
A, B = ProblemFamily.of(6144, 4096), ProblemFamily.of(4096, 4096)
BIASED = ProblemFamily.of(4608, 3584, epilogue="bias")


def configs(target=H200):
    return list(FAMILIES["operators"].configs(A, target))


def record(problem, *trials, library=20.0, target=H200, choice="kernel"):
    return TuningRecord(
        problem,
        replace(ENVIRONMENT, target=target),
        POLICY,
        choice,
        tuple(Trial(c, OK, (us,) * 9, 0.002) for c, us in trials),
        "cublas",
        (library,) * 9,
        "2026-01-01T00:00:00Z",
    )


ONE_LAYER = (Layer("a", A),)


def plan(records=(), layers=ONE_LAYER, target=H200, families=FAMILIES, **options):
    planner = Planner(MemoryRecords(*records), families, TOOLCHAIN, HOST)
    return planner.plan(Workload("w", tuple(layers)), target, **options)


def test_records_decide_and_the_rest_is_predicted_and_marked():
    config = configs()[5]
    made = plan([record(A.at(1), (config, 10.0))], ms=(1, 4))
    first, second = made.tables[0].entries
    assert (first.choice, first.origin, first.us, first.library_us, first.error) == (KERNEL, TUNED, 10.0, 20.0, 0.002)
    assert made.specs[first.kernel].config == config
    assert (second.choice, second.origin, second.us) == (KERNEL, PREDICTED, None)
    assert made.counts()["predicted_entries"] == 1
    assert made.driver == ENVIRONMENT.driver


def test_a_library_win_is_a_library_entry_without_a_kernel():
    made = plan([record(A.at(1), (configs()[0], 30.0), choice="library")], ms=(1,))
    entry = made.tables[0].entries[0]
    assert (entry.choice, entry.kernel, entry.us) == (LIBRARY, None, 20.0)
    assert made.specs == {}
    assert speedup(made.entries) == 1.0


def test_require_tuned_names_what_is_missing():
    with pytest.raises(MissingRecordError, match=r"1 of 2 problems.*2x6144x4096"):
        plan([record(A.at(1), (configs()[0], 10.0))], ms=(1, 2), require_tuned=True)


def test_untuned_problems_can_go_to_the_library():
    made = plan(ms=(1, 2), untuned="library")
    assert [(e.choice, e.origin) for e in made.entries] == [(LIBRARY, PREDICTED)] * 2
    assert made.specs == {}


def test_another_products_record_is_not_used():
    made = plan([record(A.at(1), (configs(H20)[5], 10.0), target=H20)], ms=(1,))
    assert made.tables[0].entries[0].origin == PREDICTED


def test_families_share_kernels_and_each_is_compiled_once():
    config = configs()[3]
    layers = (Layer("a", A, 32), Layer("b", B, 2), Layer("c", A, 1))
    made = plan([record(f.at(1), (config, 10.0)) for f in (A, B)], layers, ms=(1,))
    assert len(made.specs) == 1
    assert {t.family: t.count for t in made.tables} == {A: 33, B: 2}


def test_the_winner_of_a_family_that_is_not_installed_gives_way_to_the_next_best():
    gone, next_best = Config.of("elsewhere", tile=(64, 64)), configs()[7]
    made = plan([record(A.at(1), (gone, 9.0), (next_best, 10.0))], ms=(1,))
    assert made.specs[made.tables[0].entries[0].kernel].config == next_best
    only_slow = plan([record(A.at(1), (gone, 9.0), (next_best, 21.0))], ms=(1,))
    assert only_slow.tables[0].entries[0].choice == LIBRARY


def test_what_no_kernel_family_computes_goes_to_the_library():
    made = plan(layers=(Layer("qkv", BIASED),), ms=(1,))
    assert (made.tables[0].entries[0].choice, made.tables[0].entries[0].origin) == (LIBRARY, PREDICTED)


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "h20", "b200"])
def test_predictions_are_valid_configs_that_suit_small_and_large_m(name):
    target = TARGETS[name]
    space = set(FAMILIES["operators"].configs(A, target))
    small, large = (cheapest(A.at(m), target, FAMILIES) for m in (1, 8192))
    assert small in space
    assert large in space
    if len(space) > 2:
        assert small != large


def test_a_tuned_neighbour_decides_before_the_cost_model():
    config = configs()[17]
    near = Predictor([record(A.at(16), (config, 10.0))], FAMILIES, H200)
    assert near.predict(B.at(16)) == config
    assert near.predict(B.at(32)) == config
    # Too far in m, another epilogue, another product: the cost model is asked.
    assert near.predict(B.at(64)) == cheapest(B.at(64), H200, FAMILIES)
    assert near.predict(BIASED.at(16)) is None
    elsewhere = Predictor([record(A.at(16), (config, 10.0), target=H20)], FAMILIES, H200)
    assert elsewhere.predict(B.at(16)) == cheapest(B.at(16), H200, FAMILIES)


def test_a_sibling_product_decides_where_nothing_was_measured_on_the_target_itself():
    config, own = configs()[17], configs()[5]
    sibling = record(A.at(16), (config, 10.0), target=TARGETS["h100"])
    assert Predictor([sibling], FAMILIES, H200).predict(B.at(16)) == config
    # What the product itself says goes before, however far away.
    far = record(A.at(32), (own, 15.0))
    assert Predictor([sibling, far], FAMILIES, H200).predict(B.at(16)) == own
    made = plan([sibling], ms=(16,))
    (entry,) = made.tables[0].entries
    assert (entry.choice, entry.origin, entry.record, made.driver) == (KERNEL, PREDICTED, None, None)


def test_a_neighbour_that_the_library_won_predicts_the_library():
    lost = record(A.at(16), (configs()[0], 30.0), choice="library")
    assert Predictor([lost], FAMILIES, H200).predict(B.at(16)) is None
    nearer = record(B.at(8), (configs()[3], 10.0))
    assert Predictor([lost, nearer], FAMILIES, H200).predict(B.at(8)) == configs()[3]


def test_neighbours_vote_by_what_a_config_gained_and_nearer_ones_count_more():
    steady, lucky = configs()[3], configs()[9]
    # The library takes 20 us in each: one far neighbour liked `lucky` best, the near ones did not.
    records = [
        record(A.at(8), (steady, 16.0), (lucky, 18.0)),
        record(A.at(16), (steady, 16.0), (lucky, 17.0)),
        record(A.at(32), (lucky, 14.0), (steady, 17.0)),
    ]
    assert Predictor(records, FAMILIES, H200).predict(B.at(8)) == steady
    assert Predictor(records[2:], FAMILIES, H200).predict(B.at(32)) == lucky
    assert Predictor(records[::-1], FAMILIES, H200).predict(B.at(8)) == steady


def test_a_gain_too_small_to_rely_on_elsewhere_goes_to_the_library():
    assert Predictor([record(A.at(16), (configs()[3], 19.8))], FAMILIES, H200).predict(B.at(16)) is None
    assert Predictor([record(A.at(16), (configs()[3], 19.0))], FAMILIES, H200).predict(B.at(16)) == configs()[3]


def test_table_and_loader_agree_for_every_m():
    tuned = [1, 2, 4, 16, 100, 256, 4096]
    chosen = {m: configs()[i % len(configs())] for i, m in enumerate(tuned)}
    made = plan([record(A.at(m), (c, 10.0)) for m, c in chosen.items()], ms=tuple(tuned))
    table = made.tables[0]
    functions = {d: (d, 8, 16) for d in made.specs}
    dispatcher = Dispatcher(table, functions)
    for m in range(1, 8193):
        choice = dispatcher.choose(m)
        step = next((i for i, (low, high) in enumerate(table.ladder.steps()) if low <= m <= high), None)
        if step is None:
            assert choice.entry is None
            assert choice.function is None
            assert choice.where == ("above" if m > 4096 else "between")
        else:
            assert choice.entry == table.entries[step]
            assert choice.function == table.entries[step].kernel
            assert made.specs[choice.function].config == chosen[table.entries[step].m]
