"""The limits in front of a kernel, for shapes and strides that no test could allocate."""

from __future__ import annotations

import pytest

from gemmcache.runtime.guards import matrix_flaw, transposed, vector_flaw

torch = pytest.importorskip("torch")


def meta(rows: int, columns: int, row_stride: int, column_stride: int = 1):
    """A tensor without memory; as_strided checks nothing on this device."""
    base = torch.empty((rows - 1) * abs(row_stride) + columns * column_stride + 1, device="meta", dtype=torch.bfloat16)
    return base.as_strided((rows, columns), (row_stride, column_stride))


@pytest.mark.parametrize(
    ("rows", "columns", "row_stride"),
    [
        (1 << 16, 1 << 15, 1 << 15),
        ((1 << 31) // 28672 + 1, 28672, 28672),
        (1 << 20, 64, 1 << 11),
        (1 << 31, 8, 8),
        (2, 64, (1 << 31) - 8),
        (3, 64, 1 << 40),
    ],
)
def test_what_spans_two_to_the_31_elements_goes_to_the_library(rows, columns, row_stride):
    assert matrix_flaw(meta(rows, columns, row_stride), 8) == "size"


def test_what_stays_just_below_is_taken():
    assert matrix_flaw(meta((1 << 31) // 28672, 28672, 28672), 8) is None
    assert matrix_flaw(meta(2, 64, (1 << 30) - 8), 8) is None


@pytest.mark.parametrize(
    ("shape", "flaw"),
    [
        ((4, 64, 64), None),
        ((4, 64, 72), None),
        ((4, 64, 68), "strides"),
        ((4, 64, 63), "strides"),
        ((4, 64, 32), "strides"),
        ((4, 64, 0), "strides"),
        ((4, 64, 128, 2), "strides"),
        ((4, 64, 1, 4), "strides"),
    ],
)
def test_rows_that_a_kernel_does_not_take_are_told_by_what_is_wrong(shape, flaw):
    assert matrix_flaw(meta(*shape), 8) == flaw


@pytest.mark.parametrize(
    ("shape", "strides", "flaw"),
    [
        ((), (), None),
        ((8,), (1,), None),
        ((8, 1), (1, 1), None),
        ((1, 8), (99, 1), None),
        ((2, 4, 1), (4, 1, 1), None),
        ((8,), (2,), "alignment"),
        ((8,), (0,), "alignment"),
        ((8, 1), (5, 1), "alignment"),
        ((2, 4, 1), (8, 1, 1), "alignment"),
        ((1,), (2,), "alignment"),
    ],
)
def test_vectors_with_gaps_are_told(shape, strides, flaw):
    assert vector_flaw(torch.zeros(64).as_strided(shape, strides)) == flaw


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((4, 64, 64), False),
        ((4, 64, 1, 4), True),
        ((4, 64, 1, 8), True),
        ((4, 64, 1, 3), False),
        ((1, 64, 64), False),
        ((64, 1, 1), False),
        ((4, 64, 0), False),
        ((4, 64, 2, 8), False),
    ],
)
def test_columns_that_are_contiguous_make_a_matrix_transposed(shape, turned):
    assert transposed(meta(*shape)) is turned
