"""The canonical encoding: one form for each value, and every other form refused."""

from __future__ import annotations

import math
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache import codec
from gemmcache.codec import decode, encode
from gemmcache.errors import IntegrityError, UsageError
from tests import strategies

with_floats = st.recursive(
    st.one_of(strategies.texts, st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(strategies.texts, inner, max_size=4)),
    max_leaves=15,
)


@given(strategies.canonical_values)
def test_decode_gives_back_what_encode_took(value):
    again = decode(encode(value))
    assert again == value
    assert repr(again) == repr(codec._canonical(value, False, 0))


@given(with_floats)
def test_floats_round_trip_where_they_are_allowed(value):
    assert decode(encode(value, floats=True), floats=True) == value


@given(strategies.canonical_values, strategies.canonical_values)
def test_equal_bytes_mean_equal_values(one, other):
    assert (encode(one) == encode(other)) == (
        repr(codec._canonical(one, False, 0)) == repr(codec._canonical(other, False, 0))
    )


@given(strategies.canonical_values)
def test_every_truncation_is_refused(value):
    data = encode(value)
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            decode(data[:length])


@given(strategies.canonical_values, st.binary(min_size=1, max_size=4))
def test_trailing_bytes_are_refused(value, tail):
    with pytest.raises(IntegrityError):
        decode(encode(value) + tail)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_are_canonical(data):
    try:
        value = decode(data, floats=True)
    except IntegrityError:
        return
    assert encode(value, floats=True) == data


@given(strategies.canonical_values, st.data())
def test_a_changed_byte_never_decodes_to_the_same_value(value, data):
    stored = bytearray(encode(value))
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    try:
        again = decode(bytes(stored))
    except IntegrityError:
        return
    assert encode(again) != encode(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x82\xa1b\x01\xa1a\x01", "canonical form"),  # keys out of order
        (b"\x82\xa1a\x01\xa1a\x01", "canonical form"),  # one key twice
        (b"\xcc\x05", "canonical form"),  # 5 in two bytes
        (b"\xd3" + struct.pack(">q", 5), "canonical form"),  # 5 in nine
        (b"\xd9\x01a", "canonical form"),  # text with a longer length
        (b"\xc5\x00\x01a", "canonical form"),  # bytes with a longer length
        (b"\xdc\x00\x01\x01", "canonical form"),  # list with a longer length
        (b"\xde\x00\x00", "canonical form"),  # map with a longer length
        (b"\xcb" + struct.pack(">d", 1.0), "float 1.0"),  # a float in a key
        (b"\x81\x01\x01", "msgpack"),  # a key that is a number
        (b"\x81\xc4\x01a\x01", "not a string"),  # a key of bytes
        (b"\x81\xc0\x01", "msgpack"),  # a key that is nil
        (b"\xa1\xff", "msgpack"),  # not UTF-8
        (b"\xa3\xed\xa0\x80", "msgpack"),  # a surrogate
        (b"\xd4\x05a", "msgpack"),  # an extension
        (b"\xd6\xff\x00\x00\x00\x00", "msgpack"),  # a timestamp
        (b"\xc1", "msgpack"),  # never used
        (b"", "msgpack"),
        (b"\xc6\xff\xff\xff\xff", "msgpack"),  # 4 GiB of bytes announced
        (b"\xdb\xff\xff\xff\xff", "msgpack"),  # 4 GiB of text
        (b"\xdd\xff\xff\xff\xff", "msgpack"),  # 4 Gi items
        (b"\xdf\xff\xff\xff\xff", "msgpack"),  # 4 Gi pairs
    ],
)
def test_forms_that_encode_never_writes_are_refused(data, message):
    with pytest.raises(IntegrityError, match=message):
        decode(data, what="the thing")
    with pytest.raises(IntegrityError, match="the thing"):
        decode(data, what="the thing")


@pytest.mark.parametrize("number", [1.5, -0.0, 1e300])
def test_floats_have_one_form_and_belong_to_values_only(number):
    stored = encode(number, floats=True)
    assert stored == b"\xcb" + struct.pack(">d", number)
    with pytest.raises(IntegrityError, match="float"):
        decode(stored)
    with pytest.raises(UsageError, match="a key can't hold"):
        encode({"a": [number]})
    with pytest.raises(IntegrityError, match="canonical form"):
        decode(b"\xca" + struct.pack(">f", 1.5), floats=True)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_both_ways(number):
    with pytest.raises(UsageError):
        encode(number, floats=True)
    with pytest.raises(IntegrityError):
        decode(msgpack.packb(number), floats=True)


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_bounded():
    assert decode(encode(nested(codec.MAX_DEPTH))) == nested(codec.MAX_DEPTH)
    with pytest.raises(UsageError, match="nested"):
        encode(nested(codec.MAX_DEPTH + 1))
    for bomb in (b"\x91" * (codec.MAX_DEPTH + 1) + b"\x00", b"\x91" * 1_000_000, b"\x81\xa0" * 100_000):
        with pytest.raises(IntegrityError):
            decode(bomb)
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(UsageError, match="nested"):
        encode(cycle)


def test_sizes_are_bounded():
    with pytest.raises(IntegrityError, match="more than the 4 allowed"):
        decode(encode("12345"), max_bytes=4)
    with pytest.raises(UsageError, match="longer than"):
        encode([0] * (codec.MAX_ITEMS + 1))
    assert decode(encode([0] * codec.MAX_ITEMS)) == [0] * codec.MAX_ITEMS
    with pytest.raises(IntegrityError):
        decode(msgpack.packb([0] * (codec.MAX_ITEMS + 1)))
    with pytest.raises(IntegrityError, match="more than 10 items"):
        decode(encode([[0, 0, 0, 0], [0, 0, 0, 0]]), max_total=10)


@pytest.mark.parametrize(
    "value",
    [
        1 << 64,
        -(1 << 63) - 1,
        1 << 100_000,
        "\ud800",
        {"\ud800": 1},
        {1: 2},
        {None: 1},
        {b"a": 1},
        {1, 2},
        object(),
        bytearray(b"a"),
        1j,
    ],
    ids=lambda v: type(v).__name__,
)
def test_values_that_the_format_has_no_form_for(value):
    with pytest.raises(UsageError):
        encode(value)


def test_flags_and_numbers_are_different_values():
    assert len({encode(v) for v in (True, 1, "1", b"1", [1], {"1": 1}, None, False, 0)}) == 9


def test_digests_have_a_kind_and_a_form():
    assert codec.digest("a", [1]) != codec.digest("b", [1])
    # By hand: the format must not drift between releases.
    stored = bytes.fromhex("92a17882a16195c3c0a174c40100ffa16201")
    assert codec.encode(["x", {"b": 1, "a": [True, None, "t", b"\x00", -1]}]) == stored
    assert codec.digest("x", {"b": 1, "a": [True, None, "t", b"\x00", -1]}) == codec.bytes_digest(stored)
    assert codec.is_digest(codec.digest("a", 1))
    for wrong in ("", "a" * 63, "A" * 64, "g" * 64, b"a" * 64, None, "a" * 64 + "\n"):
        assert not codec.is_digest(wrong)
