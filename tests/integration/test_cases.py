"""docs/cases.md names tests that exist, for every case, and GPU tests only as such."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCUMENT = ROOT / "docs" / "cases.md"
ROWS = {
    int(cells[0]): cells
    for line in DOCUMENT.read_text().splitlines()
    if line.startswith("| ") and (cells := [c.strip() for c in line.strip("|\n").split("|")])[0].isdigit()
}
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}


def test_every_case_has_a_row_of_four_cells():
    assert list(ROWS) == list(range(1, 31))
    assert all(len(cells) == 4 and all(cells) for cells in ROWS.values())


@pytest.mark.parametrize("number", ROWS)
def test_every_test_that_a_case_names_exists(number):
    named = NAMED.findall(ROWS[number][3])
    assert named
    assert ROWS[number][3].count("tests/") == len(named), "a test is not named as `file::name`"
    missing = [f"{f}::{t}" for f, t in named if not (ROOT / f).is_file() or t not in functions(ROOT / f)]
    assert missing == []


def test_a_case_that_only_a_device_can_hold_says_so():
    for cells in ROWS.values():
        if any(f.startswith("tests/gpu/") for f, _ in NAMED.findall(cells[3])):
            assert "device" in cells[3]
