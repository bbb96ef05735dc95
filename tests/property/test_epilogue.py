"""The text form of epilogues: one canonical text each, and nothing that is silently something else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.epilogue import ACTIVATIONS, GATES, SCALES, Epilogue
from gemmcache.errors import UsageError
from tests import strategies


@given(strategies.epilogues())
def test_text_and_back(epilogue):
    assert Epilogue.parse(str(epilogue)) == epilogue


@given(strategies.epilogues(), st.data())
def test_steps_may_come_in_any_order_and_with_spaces(epilogue, data):
    steps = data.draw(st.permutations(str(epilogue).split("+")))
    again = Epilogue.parse(" + ".join(steps))
    assert again == epilogue
    assert str(again) == str(epilogue)


@given(strategies.epilogues(), strategies.epilogues())
def test_texts_are_equal_exactly_if_the_epilogues_are(one, other):
    assert (str(one) == str(other)) == (one == other)


def test_all_epilogues_have_texts_of_their_own():
    middles = [{}, *({"activation": a} for a in ACTIVATIONS), *({"gate": g} for g in GATES)]
    ends = [{}, {"residual": True}, {"residual": True, "beta": "0.5"}]
    every = [
        Epilogue(scale=scale, bias=bias, **middle, **end)
        for scale, bias, middle, end in itertools.product((None, *SCALES), (False, True), middles, ends)
    ]
    assert len({str(e) for e in every}) == len(every) == 5 * 2 * 7 * 3
    assert all(Epilogue.parse(str(e)) == e for e in every)
    assert [e for e in every if not e] == [Epilogue()]


@pytest.mark.parametrize("text", ["", "none", " none "])
def test_no_epilogue(text):
    assert Epilogue.parse(text) == Epilogue()
    assert str(Epilogue.parse(text)) == "none"
    assert not Epilogue.parse(text)
    assert Epilogue.parse(text).operands() == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tanh", "'tanh' is not known"),
        ("Bias", "not known"),
        ("bias+bias", "two steps"),
        ("relu+gelu", "two steps"),
        ("swiglu+geglu", "two steps"),
        ("scale_row+scale_column", "two steps"),
        ("residual+residual*2", "two steps"),
        ("relu+swiglu", "not both"),
        ("bias+", "empty step"),
        ("+", "empty step"),
        ("none+bias", "empty step"),
        ("scale_", "scale ''"),
        ("scale_block", "scale 'block'"),
        ("residual*", "residual factor"),
        ("residual*x", "residual factor"),
        ("residual*1e3", "residual factor"),
        ("residual*0.50", "residual factor"),
        ("residual*1.0", "residual factor"),
        ("residual*01", "residual factor"),
        ("residual*-0", "residual factor"),
        ("residual*.5", "residual factor"),
        ("residual* 2", "residual factor"),
        ("residual*nan", "residual factor"),
        ("residual*٣", "residual factor"),
        ("residual*1\n+bias", None),
    ],
)
def test_texts_that_are_no_epilogue(text, message):
    if message is None:
        # Spaces around steps are dropped, the end of a line too.
        assert str(Epilogue.parse(text)) == "bias+residual"
        return
    with pytest.raises(UsageError, match=message):
        Epilogue.parse(text)


def test_factors_keep_their_text():
    for beta in ("0", "2", "-1", "0.5", "-0.125", "999999.99999999"):
        assert str(Epilogue(residual=True, beta=beta)) == f"residual*{beta}"
    assert str(Epilogue(residual=True, beta="1")) == "residual"
    assert str(Epilogue.parse("residual*1")) == "residual"
    with pytest.raises(UsageError, match="needs a residual"):
        Epilogue(beta="0.5")


def test_operands_come_in_the_order_of_the_entry():
    parse = Epilogue.parse
    assert parse("residual+bias+scale_tensor").operands() == ("scale_a", "scale_b", "bias", "residual")
    assert parse("scale_row_column").operands() == ("scale_a", "scale_b")
    assert parse("scale_row").operands() == ("scale_a",)
    assert parse("scale_column").operands() == ("scale_b",)
    assert parse("swiglu").operands() == ()


def test_a_gate_halves_the_columns():
    assert Epilogue.parse("swiglu").out_columns(64) == 32
    assert Epilogue.parse("gelu").out_columns(63) == 63
    with pytest.raises(UsageError, match="even n"):
        Epilogue.parse("geglu").out_columns(63)
