"""The one rule from m to an entry, against a model that tries every tuned point."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.errors import UsageError
from gemmcache.ladder import ABOVE, BELOW, BETWEEN, DEFAULT_MS, INSIDE, Ladder, parse_ms

ladders = st.lists(st.integers(1, 8192), min_size=1, max_size=20).map(Ladder.of)


def model(bounds: tuple[int, ...], m: int) -> tuple[int | None, str]:
    """What the rule says, without any search: round up by at most 15 rows and by less than a factor of two."""
    for i, bound in enumerate(bounds):
        if m <= bound:
            if bound < 2 * m and bound - m <= 15:
                return i, INSIDE
            return None, BETWEEN if i else BELOW
    return None, ABOVE


@given(ladders)
def test_every_m_has_the_one_outcome_that_the_rule_gives(ladder):
    located = [ladder.locate(m) for m in range(1, 8194)]
    assert located == [model(ladder.bounds, m) for m in range(1, 8194)]


@given(ladders)
def test_steps_and_locate_agree(ladder):
    steps = ladder.steps()
    assert len(steps) == len(ladder.bounds)
    served: dict[int, int] = {}
    for i, (first, last) in enumerate(steps):
        assert 1 <= first <= last == ladder.bounds[i]
        for m in range(first, last + 1):
            assert m not in served
            served[m] = i
    for m in range(1, ladder.bounds[-1] + 2):
        index, where = ladder.locate(m)
        assert index == served.get(m)
        assert (where == INSIDE) == (m in served)


@given(ladders, st.integers(1, 1 << 40))
def test_an_entry_is_never_reached_from_half_its_m_or_less(ladder, m):
    index, _ = ladder.locate(m)
    if index is not None:
        assert m <= ladder.bounds[index] < 2 * m
        assert ladder.bounds[index] - m <= 15


@given(ladders)
def test_around_every_tuned_point(ladder):
    for i, bound in enumerate(ladder.bounds):
        assert ladder.locate(bound) == (i, INSIDE)
        assert ladder.locate(bound - 1)[0] in ({i, i - 1, None} if i else {0, None})
        assert ladder.locate(bound + 1)[0] in {i + 1, None}


@given(ladders, st.integers(1, 8192))
def test_more_tuned_points_never_leave_an_m_without_an_entry(ladder, extra):
    more = Ladder.of((*ladder.bounds, extra))
    for m in range(1, 8193, 7):
        if ladder.locate(m)[0] is not None:
            assert more.locate(m)[0] is not None


def test_the_default_ladder():
    ladder = Ladder(DEFAULT_MS)
    assert DEFAULT_MS == (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert all(ladder.locate(m)[1] == INSIDE for m in range(1, 129))
    between = [m for m in range(1, 8193) if ladder.locate(m)[1] == BETWEEN]
    assert between[:2] == [129, 130]
    assert {241, 256, 8177, 8192}.isdisjoint(between)
    assert {240, 8176} <= set(between)
    assert all(ladder.locate(m)[1] in (INSIDE, BETWEEN) for m in range(1, 8193))
    assert ladder.locate(8193) == (None, ABOVE)


def test_a_partial_ladder_does_not_answer_for_ms_that_nothing_tuned():
    ladder = Ladder((2048, 4096))
    assert ladder.locate(1) == (None, BELOW)
    assert ladder.locate(2032) == (None, BELOW)
    assert ladder.locate(2033) == (0, INSIDE)
    assert ladder.locate(2048) == (0, INSIDE)
    assert ladder.locate(2049) == (None, BETWEEN)
    assert ladder.locate(4081) == (1, INSIDE)
    assert ladder.locate(4097) == (None, ABOVE)
    assert ladder.locate(1 << 40) == (None, ABOVE)


def test_between_is_told_from_both_ends():
    ladder = Ladder((1, 64))
    assert [ladder.locate(m) for m in (1, 2, 48, 49, 64, 65)] == [
        (0, INSIDE),
        (None, BETWEEN),
        (None, BETWEEN),
        (1, INSIDE),
        (1, INSIDE),
        (None, ABOVE),
    ]


@pytest.mark.parametrize("m", [0, -1])
def test_no_entry_below_1(m):
    assert Ladder((1, 2)).locate(m) == (None, BELOW)


@pytest.mark.parametrize("bounds", [(), (0,), (-1, 1), (1, 1), (2, 1)])
def test_bounds_that_are_no_ladder(bounds):
    with pytest.raises(UsageError, match="ladder"):
        Ladder(bounds)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("7", (7,)),
        ("4,1,2,2", (1, 2, 4)),
        ("1..8192", tuple(1 << i for i in range(14))),
        ("3..20", (3, 4, 8, 16, 20)),
        ("5..5", (5,)),
        ("1..4, 100", (1, 2, 4, 100)),
    ],
)
def test_ms_as_people_write_them(text, ms):
    assert parse_ms(text) == ms
    assert parse_ms(",".join(map(str, ms))) == ms


@pytest.mark.parametrize("text", ["", "a", "0", "-1", "4..2", "1..", "..4", "1,,2", "1.5", "1...4", "9" * 5000])
def test_texts_that_are_no_ms(text):
    with pytest.raises(UsageError):
        parse_ms(text)
