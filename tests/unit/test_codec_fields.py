"""`codec.Fields`: complaints name the place, the field and what is wrong with it."""

from __future__ import annotations

import math

import pytest

from gemmcache.codec import Fields, finite
from gemmcache.errors import IntegrityError, UsageError

DIGEST = "0123456789abcdef" * 4
VALUE = {
    "text": "x",
    "n": 3,
    "f": 1.5,
    "yes": True,
    "digest": DIGEST,
    "list": [1, 2],
    "map": {"inner": 1},
    "maps": [{"a": 1}, {"a": "x"}],
    "nil": None,
}


def fields(**more: object) -> Fields:
    return Fields({**VALUE, **more}, "thing")


def test_values_come_as_they_are():
    f = fields()
    assert f.text("text") == "x"
    assert f.integer("n") == 3
    assert f.number("f") == 1.5
    assert isinstance(f.number("n"), float)
    assert f.flag("yes") is True
    assert f.digest("digest") == f.opt_digest("digest") == DIGEST
    assert f.items("list") == [1, 2]
    assert f.sub("map").integer("inner") == 1
    assert [s.raw("a") for s in f.subs("maps")] == [1, "x"]
    assert f.choice("text", ("x", "y")) == "x"
    assert f.opt_text("nil") is f.opt_number("nil") is f.opt_digest("nil") is None
    assert f.opt_text("text") == "x"
    assert f.opt_number("n") == 3.0
    f.done()


def test_defaults_stand_in_for_what_is_missing_only():
    f = fields()
    assert f.text("no", "d") == "d"
    assert f.integer("no", 7) == 7
    assert f.number("no", 0.5) == 0.5
    assert f.flag("no", False) is False
    assert f.items("no", []) == []
    assert f.choice("no", ("a", "b"), "a") == "a"
    assert f.opt_text("no") is f.opt_digest("no") is f.opt_number("no") is None
    with pytest.raises(IntegrityError, match="must be an integer"):
        f.integer("text", 7)
    with pytest.raises(IntegrityError, match="must be text"):
        f.text("nil", "d")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.text("no"), "thing: field 'no' is missing"),
        (lambda f: f.text("n"), "field 'n' must be text, not int"),
        (lambda f: f.opt_text("n"), "field 'n' must be text, not int"),
        (lambda f: f.integer("yes"), "field 'yes' must be an integer, not bool"),
        (lambda f: f.integer("f"), "must be an integer, not float"),
        (lambda f: f.integer("n", low=4), "is 3, outside 4"),
        (lambda f: f.integer("n", high=2), "is 3, outside 0..2"),
        (lambda f: f.number("yes"), "must be a number, not bool"),
        (lambda f: f.number("text"), "must be a number, not str"),
        (lambda f: f.opt_number("text"), "must be a number, not str"),
        (lambda f: f.flag("n"), "must be true or false, not int"),
        (lambda f: f.digest("text"), "not a sha256 digest"),
        (lambda f: f.opt_digest("n"), "not a sha256 digest"),
        (lambda f: f.choice("text", ("a", "b")), "is 'x', not one of a, b"),
        (lambda f: f.items("text"), "must be a list, not str"),
        (lambda f: f.items("list", most=1), "has 2 items, more than the 1 allowed"),
        (lambda f: f.sub("list"), "thing.list: expected a map, found list"),
        (lambda f: f.subs("list"), r"thing.list\[0\]: expected a map, found int"),
        (lambda f: f.subs("maps")[1].integer("a"), r"thing.maps\[1\]: field 'a' must be an integer"),
        (lambda f: f.done(), "is not known here"),
    ],
)
def test_complaints_name_place_field_and_trouble(call, message):
    with pytest.raises(IntegrityError, match=message):
        call(fields())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 10**400])
def test_numbers_that_files_can_hold_and_floats_cannot(number):
    assert finite(number) is None
    with pytest.raises(IntegrityError, match="'x' is not a finite number"):
        fields(x=number).number("x")


def test_finite():
    assert finite(2) == 2.0
    assert isinstance(finite(2), float)
    assert finite(True) is finite("1") is finite(None) is None


def test_files_of_people_are_usage_errors():
    for call in (
        lambda: Fields([], "file.yaml", kind=UsageError),
        lambda: Fields({"a": 1}, "file.yaml", kind=UsageError).text("a"),
        lambda: Fields({"a": {"b": 1}}, "file.yaml", kind=UsageError).sub("a").text("b"),
        lambda: Fields({1: 2}, "file.yaml", kind=UsageError),
    ):
        with pytest.raises(UsageError, match=r"file\.yaml"):
            call()


def test_extra_is_what_nothing_asked_for():
    f = Fields({"a": 1, "b": 2, "c": 3}, "thing")
    f.integer("a")
    f.opt_text("missing")
    assert f.extra() == {"b": 2, "c": 3}
