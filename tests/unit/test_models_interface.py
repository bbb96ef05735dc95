"""Workload: its canonical form, and how traffic becomes weights."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmcache import codec
from gemmcache.epilogue import Epilogue
from gemmcache.errors import IntegrityError, UsageError
from gemmcache.ladder import DEFAULT_MS
from gemmcache.models.interface import EPILOGUES, PARALLEL, Layer, Workload
from gemmcache.models.traffic import Traffic
from gemmcache.problem import ProblemFamily

FAMILY = ProblemFamily.of(64, 32)

_families = st.builds(
    ProblemFamily.of,
    n=st.integers(1, 1 << 20),
    k=st.integers(1, 1 << 20),
    dtype=st.sampled_from(["bf16", "fp16", "fp8"]),
    epilogue=st.sampled_from(["none", "bias", "bias+gelu_tanh"]),
)
_layers = st.builds(
    Layer,
    path=st.text(min_size=1, max_size=20),
    family=_families,
    count=st.integers(1, 1000),
    parallel=st.sampled_from(PARALLEL),
    proposed=st.sampled_from([None, Epilogue(), Epilogue(bias=True), Epilogue(activation="silu", residual=True)]),
)
_histograms = st.dictionaries(st.integers(1, 20000), st.integers(1, 50), min_size=1, max_size=8)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    layers = tuple(draw(st.lists(_layers, min_size=1, max_size=4)))
    traffic = Traffic()
    for layer in draw(st.lists(st.sampled_from(layers), max_size=3)):
        traffic.add(layer.family, draw(_histograms))
    notes = tuple(draw(st.lists(st.text(max_size=20), max_size=2)))
    return Workload(draw(st.text(max_size=10)), layers, traffic.shares(), notes)


@given(workloads())
@settings(max_examples=50)
def test_value_round_trip(workload: Workload) -> None:
    data = codec.encode(workload.to_value(), floats=True)
    assert Workload.from_value(codec.decode(data, floats=True)) == workload


@given(workloads())
@settings(max_examples=50)
def test_weights_add_up_to_counts(workload: Workload) -> None:
    weights = workload.problems()
    for family, count in workload.families().items():
        assert sum(w for p, w in weights.items() if p.family == family) == pytest.approx(count)


@given(workloads(), st.sampled_from(EPILOGUES))
@settings(max_examples=50)
def test_every_choice_of_epilogues_counts_each_layer_in_full(workload: Workload, choice: str) -> None:
    chosen = workload.with_epilogues(choice)
    expected: dict[ProblemFamily, int] = {}
    for layer in workload.layers:
        families = {"none": [layer.family], "model": [layer.fused().family]}
        both = list(dict.fromkeys(families["none"] + families["model"]))
        for family in {**families, "both": both}[choice]:
            expected[family] = expected.get(family, 0) + layer.count
            assert family.epilogue in (layer.family.epilogue, layer.proposed)
    assert chosen.families() == expected
    assert (chosen.name, chosen.m_weights, chosen.notes) == (workload.name, workload.m_weights, workload.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"notes": [1]}, "must hold text"),
        ({"notes": "text"}, "notes"),
        ({"layers": [{"proposed": "tanh"}]}, "'proposed'"),
        ({"layers": [{"proposed": 1}]}, "'proposed'"),
    ],
)
def test_bad_notes_and_proposals_are_refused(change: dict[str, object], message: str) -> None:
    value = Workload("w", (Layer("a", FAMILY, proposed=Epilogue(bias=True)),), notes=("note",)).to_value()
    layer = value["layers"][0]
    value.update({name: [{**layer, **found[0]}] if name == "layers" else found for name, found in change.items()})
    with pytest.raises(IntegrityError, match=message):
        Workload.from_value(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ms": [2, 1]}, "ascending"),
        ({"ms": [0, 1]}, "positive"),
        ({"ms": [True, 2]}, "positive"),
        ({"ms": []}, "positive"),
        ({"shares": [1.0]}, "one positive number"),
        ({"shares": [1.0, -1.0]}, "one positive number"),
        ({"more": 1}, "not known"),
    ],
)
def test_a_bad_histogram_is_refused(change: dict[str, object], message: str) -> None:
    value = Workload("w", (Layer("a", FAMILY),), ((FAMILY, ((1, 0.5), (2, 0.5))),)).to_value()
    value["m_weights"][0].update(change)
    with pytest.raises(IntegrityError, match=message):
        Workload.from_value(value)


def test_unknown_traffic_is_equal() -> None:
    workload = Workload("w", (Layer("a", FAMILY, count=len(DEFAULT_MS)),))
    assert workload.shares(FAMILY) is None
    assert workload.problems() == {FAMILY.at(m): 1.0 for m in DEFAULT_MS}


def test_override_takes_each_m_to_the_one_that_answers_for_it() -> None:
    workload = Workload("w", (Layer("a", FAMILY),), ((FAMILY, ((1, 0.5), (3, 0.25), (900, 0.25))),))
    assert workload.problems((1, 2, 4, 8)) == {
        FAMILY.at(1): 0.5,
        FAMILY.at(2): 0.0,
        FAMILY.at(4): 0.25,
        FAMILY.at(8): 0.0,
    }
    # Nothing seen falls on this ladder: equal shares, not zeros.
    assert workload.problems((64, 128)) == {FAMILY.at(64): 0.5, FAMILY.at(128): 0.5}


def test_bad_layers() -> None:
    with pytest.raises(UsageError, match="count"):
        Layer("a", FAMILY, count=0)
    with pytest.raises(UsageError, match="parallel"):
        Layer("a", FAMILY, parallel="both")
