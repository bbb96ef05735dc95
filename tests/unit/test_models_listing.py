"""Plain lists of problems, in JSON and YAML."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmcache.errors import UsageError
from gemmcache.ladder import DEFAULT_MS
from gemmcache.models.interface import Workload
from gemmcache.models.source import load_workload
from gemmcache.problem import ProblemFamily

ITEM = {"n": 64, "k": 32}


def _load(tmp_path: Path, value: Any, **options: Any) -> Workload:
    path = tmp_path / "mine.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return load_workload(path, **options)


def test_defaults_and_all_fields(tmp_path: Path) -> None:
    full = {
        "n": 128,
        "k": 32,
        "name": "up",
        "dtype": "fp16",
        "out": "fp32",
        "epilogue": "bias+silu",
        "a_layout": "km",
        "b_layout": "kn",
        "count": 3,
    }
    workload = _load(tmp_path, [ITEM, {**full, "ms": [4, 1]}])
    assert workload.name == "mine"
    first, second = workload.layers
    assert (first.path, first.count, first.family) == ("problems[0]", 1, ProblemFamily.of(64, 32))
    assert (second.path, second.count) == ("up", 3)
    plain = ProblemFamily.of(128, 32, "fp16", "bias+silu", "fp32")
    assert second.family == replace(plain, a_layout="km", b_layout="kn")
    assert workload.ms(first.family) == DEFAULT_MS
    assert workload.ms(second.family) == (1, 4)
    assert workload.problems()[second.family.at(4)] == 1.5


@pytest.mark.parametrize("field", ["m", "ms"])
@pytest.mark.parametrize(
    ("value", "ms"), [([8, 2, 2], (2, 8)), (16, (16,)), ("1..8", (1, 2, 4, 8)), ("3,1..2", (1, 2, 3))]
)
def test_ms(field: str, value: Any, ms: tuple[int, ...], tmp_path: Path) -> None:
    workload = _load(tmp_path, [{**ITEM, field: value}])
    assert workload.ms(workload.layers[0].family) == ms


def test_items_of_one_family_add_up(tmp_path: Path) -> None:
    workload = _load(tmp_path, [{**ITEM, "m": 1, "count": 3}, {**ITEM, "m": [1, 2]}])
    family = workload.layers[0].family
    assert workload.families() == {family: 4}
    assert workload.problems() == {family.at(1): 3.5, family.at(2): 0.5}


def test_a_named_map_and_yaml(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("name: mine\nproblems:\n  - {n: 64, k: 32, ms: 1..4}\n  - n: 8\n    k: 8\n    epilogue: gelu\n")
    workload = load_workload(path)
    assert workload.name == "mine"
    assert [e.family for e in workload.layers] == [
        ProblemFamily.of(64, 32),
        ProblemFamily.of(8, 8, epilogue="gelu"),
    ]
    assert workload.ms(workload.layers[0].family) == (1, 2, 4)
    assert _load(tmp_path, {"problems": [ITEM]}).name == "mine"


def test_dtype_overrides(tmp_path: Path) -> None:
    workload = _load(tmp_path, [{**ITEM, "dtype": "fp32"}, {**ITEM, "out": "fp32"}], dtype="fp16")
    assert [e.family for e in workload.layers] == [
        ProblemFamily.of(64, 32, "fp16"),
        ProblemFamily.of(64, 32, "fp16", out="fp32"),
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "the list of problems is empty"),
        ({"problems": []}, "the list of problems is empty"),
        ({"problems": [ITEM], "model": 1}, "field 'model' is not known"),
        ({"problems": ITEM}, "field 'problems' must be a list"),
        ([ITEM, 3], "problems[1]: expected a map"),
        ([ITEM, {"n": 64}], "problems[1]: field 'k' is missing"),
        ([{**ITEM, "epilog": "bias"}], "problems[0]: field 'epilog' is not known"),
        ([{**ITEM, "n": 0}], "problems[0]: field 'n' is 0"),
        ([{**ITEM, "n": 1.5}], "problems[0]: field 'n' must be an integer"),
        ([{**ITEM, "n": True}], "problems[0]: field 'n' must be an integer"),
        ([{**ITEM, "count": 0}], "problems[0]: field 'count' is 0"),
        ([{**ITEM, "dtype": "bf17"}], "problems[0]: dtype 'bf17' is not known"),
        ([{**ITEM, "out": "bf17"}], "problems[0]: dtype 'bf17' is not known"),
        ([{**ITEM, "epilogue": "biased"}], "problems[0]: epilogue step 'biased'"),
        ([{"n": 3, "k": 8, "epilogue": "swiglu"}], "problems[0]: a gated epilogue needs an even n"),
        ([{**ITEM, "ms": "1..x"}], "problems[0]: field 'ms': '1..x' is not an m"),
        ([{**ITEM, "ms": [1, "2"]}], "problems[0]: field 'ms' must be a number"),
        ([{**ITEM, "ms": []}], "problems[0]: field 'ms' must be a number"),
        ([{**ITEM, "m": [0]}], "problems[0]: field 'm' holds an m outside"),
        ([{**ITEM, "m": 1, "ms": 2}], "problems[0]: field 'm' is another name of 'ms'"),
        ('[{"n": 1, "n": 2, "k": 3}]', "key 'n' is repeated"),
        ("[{]", "not valid JSON"),
        ("3", "neither a model config nor a list"),
    ],
)
def test_errors_name_item_and_field(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        _load(tmp_path, value)
    assert message in caught.value.message
    assert str(tmp_path / "mine.json") in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {n: 1", "not valid YAML"),
        ("- {n: 1, n: 2, k: 3}", "key 'n' is repeated"),
        ("- !!python/object/apply:os.system [echo]", "not valid YAML"),
        ("model_type: llama", "neither a model config nor a list"),
        ("- {n: 1, k: 2, ms: 1.5}", "field 'ms' must be a number"),
    ],
)
def test_yaml_errors(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "list.yml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_workload(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
