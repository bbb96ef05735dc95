"""Problems and their families: what is refused, and what follows from the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmcache import dtypes
from gemmcache.codec import Fields
from gemmcache.errors import IntegrityError, UsageError
from gemmcache.problem import MAX_DIM, Problem, ProblemFamily

FAMILY = ProblemFamily.of(4096, 1024, "bf16", "bias+gelu_tanh")


def test_of_takes_names_and_aliases():
    assert ProblemFamily.of(8, 16) == ProblemFamily(8, 16)
    assert ProblemFamily.of(8, 16, "torch.float16").a_dtype == "float16"
    fp8 = ProblemFamily.of(8, 16, "fp8", out="bf16")
    assert (fp8.a_dtype, fp8.b_dtype, fp8.out_dtype, fp8.acc_dtype) == (
        "float8_e4m3fn",
        "float8_e4m3fn",
        "bfloat16",
        "float32",
    )
    assert ProblemFamily.of(8, 16, "int8").acc_dtype == "int32"


@pytest.mark.parametrize("alias", [*dtypes.ALIASES, *dtypes.SIZES])
def test_dtype_names_are_torchs(alias):
    import torch

    dtype = getattr(torch, dtypes.dtype_name(alias))
    assert dtypes.dtype_name(str(dtype)) == dtypes.dtype_name(alias.upper())
    assert dtype.itemsize == dtypes.SIZES[dtypes.dtype_name(alias)]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UsageError, match="'bf17' is not known"):
        ProblemFamily.of(8, 8, "bf17")
    with pytest.raises(UsageError, match="not a known dtype"):
        ProblemFamily(8, 8, a_dtype="bf16")


@pytest.mark.parametrize("field", ["n", "k", "batch"])
@pytest.mark.parametrize("bad", [0, -1, MAX_DIM + 1, 1.0, True, "8", None])
def test_sizes_are_positive_integers(field, bad):
    with pytest.raises(UsageError, match=field):
        replace(FAMILY, **{field: bad})


@pytest.mark.parametrize("bad", [0, -1, MAX_DIM + 1, 1.0, True, None])
def test_m_is_a_positive_integer(bad):
    with pytest.raises(UsageError, match="m is"):
        FAMILY.at(bad)


def test_layouts_and_gates_are_checked():
    with pytest.raises(UsageError, match="a_layout 'nk'"):
        replace(FAMILY, a_layout="nk")
    with pytest.raises(UsageError, match="even n"):
        ProblemFamily.of(9, 8, epilogue="swiglu")
    assert ProblemFamily.of(10, 8, epilogue="swiglu").out_columns == 5


def test_flops_and_bytes():
    problem = Problem(ProblemFamily.of(10, 8, "bf16", "swiglu", out="float32"), 3)
    assert problem.flops == 2 * 3 * 10 * 8
    assert problem.min_bytes == 3 * 8 * 2 + 10 * 8 * 2 + 3 * 5 * 4
    twice = Problem(replace(problem.family, batch=2), 3)
    assert (twice.flops, twice.min_bytes) == (2 * problem.flops, 2 * problem.min_bytes)


def test_texts():
    assert str(FAMILY) == "4096x1024 bfloat16 bias+gelu_tanh"
    assert str(FAMILY.at(7)) == "7x4096x1024 bfloat16 bias+gelu_tanh"
    other = ProblemFamily(8, 16, "float8_e4m3fn", "float8_e5m2", batch=2, b_layout="kn")
    assert str(other) == "8x16 float8_e4m3fnxfloat8_e5m2->bfloat16 batch 2 mk,kn,mn"


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("n", 0, "'n' is 0"),
        ("k", "8", "'k' must be an integer"),
        ("a_dtype", "bf16", "a_dtype 'bf16'"),
        ("epilogue", "gelu_tanh+bias", "not in canonical form"),
        ("epilogue", "residual*1", "not in canonical form"),
        ("epilogue", "", "not in canonical form"),
        ("epilogue", "tanh", "'tanh' is not known"),
        ("out_layout", "xy", "out_layout 'xy'"),
    ],
)
def test_stored_families_are_checked(field, bad, message):
    value = {**FAMILY.to_value(), field: bad}
    with pytest.raises(IntegrityError, match=message):
        ProblemFamily.from_value(value)
    with pytest.raises(UsageError, match=message) as caught:
        ProblemFamily.from_fields(Fields(value, "file.yaml", kind=UsageError))
    assert caught.value.message.count("file.yaml") == 1
