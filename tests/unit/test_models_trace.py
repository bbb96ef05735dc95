"""Trace folders: definitions, the histogram of m, and what is wrong with a broken one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gemmcache.errors import UsageError
from gemmcache.ladder import DEFAULT_MS
from gemmcache.models.source import load_workload
from gemmcache.problem import ProblemFamily

TRACE = Path(__file__).resolve().parents[1] / "data" / "trace"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    shutil.copytree(TRACE, tmp_path / "trace")
    return tmp_path / "trace"


def _edit(trace: Path, change: Any) -> None:
    path = trace / "definitions" / "gemm_n6144_k4096.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_definitions_and_traffic() -> None:
    workload = load_workload(TRACE)
    assert workload.name == "trace"
    assert [(e.path, e.count, e.family) for e in workload.layers] == [
        ("gemm_n128_k2048", 1, ProblemFamily.of(128, 2048, "fp16")),
        ("gemm_n5120_k17408", 1, ProblemFamily.of(5120, 17408, "fp16")),
        ("gemm_n6144_k4096", 1, ProblemFamily.of(6144, 4096, "fp16")),
    ]
    small, untraced, large = (e.family for e in workload.layers)
    assert len(workload.ms(small)) == 25
    assert workload.ms(small)[:6] == (1, 2, 4, 5, 6, 8)
    assert workload.ms(small)[-1] == 16294
    assert len(workload.ms(large)) == 43
    assert workload.ms(untraced) == DEFAULT_MS
    assert workload.shares(small) == [1 / 25] * 25


def test_repeated_ms_weigh_more_and_equal_families_add_up(trace: Path) -> None:
    lines = [json.dumps({"definition": "gemm_n128_k2048", "workload": {"axes": {"M": m}}}) for m in (1, 1, 1, 7)]
    (trace / "workloads" / "gemm_n128_k2048.jsonl").write_text("\n".join(lines) + "\n\n")
    family = ProblemFamily.of(128, 2048, "fp16")
    assert dict(load_workload(trace).m_weights)[family] == ((1, 0.75), (7, 0.25))
    same = json.loads((trace / "definitions" / "gemm_n128_k2048.json").read_text()) | {"name": "again"}
    (trace / "definitions" / "again.json").write_text(json.dumps(same))
    (trace / "workloads" / "again.jsonl").write_text(lines[3].replace("gemm_n128_k2048", "again") * 1)
    workload = load_workload(trace)
    assert dict(workload.m_weights)[family] == ((1, 0.6), (7, 0.4))
    assert workload.families()[family] == 2


def test_dtype_layouts_and_other_operations(trace: Path) -> None:
    def change(value: Any) -> None:
        value["inputs"]["B"]["shape"] = ["K", "N"]
        value["outputs"]["C"]["dtype"] = "float32"

    _edit(trace, change)
    nested = trace / "definitions" / "attention"
    nested.mkdir()
    (nested / "a.json").write_text(json.dumps({"name": "a", "op_type": "gqa_paged", "axes": {}}))
    (trace / "workloads" / "a.jsonl").write_text('{"definition": "a", "workload": {"axes": {"len": 1}}}\n')
    family = load_workload(trace).layers[-1].family
    assert (family.b_layout, family.a_dtype, family.out_dtype) == ("kn", "float16", "float32")
    family = load_workload(trace, dtype="bf16").layers[-1].family
    assert (family.b_layout, family.a_dtype, family.out_dtype) == ("kn", "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("name"), "field 'name' is missing"),
        (lambda v: v.pop("op_type"), "field 'op_type' is missing"),
        (lambda v: v["axes"].pop("K"), "field 'K' is missing"),
        (lambda v: v["axes"].update(L={"type": "var"}), "field 'L' is not known"),
        (lambda v: v["axes"]["M"].update(type="const"), "must be a variable axis"),
        (lambda v: v["axes"]["N"].update(value=0), "field 'value' is 0"),
        (lambda v: v["inputs"]["A"].update(dtype="float3"), "'float3' is not known"),
        (lambda v: v["inputs"]["A"].update(shape=["M", "N"]), "field 'shape' is ['M', 'N']"),
        (lambda v: v["inputs"]["B"].update(shape=["N"]), "field 'shape' is ['N']"),
        (lambda v: v["inputs"].update(bias={}), "field 'bias' is a tensor of no plain GEMM"),
        (lambda v: v.update(name="gemm_n128_k2048"), "is in another file too"),
    ],
)
def test_broken_definitions(change: Any, message: str, trace: Path) -> None:
    _edit(trace, change)
    with pytest.raises(UsageError) as caught:
        load_workload(trace)
    assert message in caught.value.message
    assert "gemm_n6144_k4096.json" in caught.value.message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a map"),
        ('{"definition": "nope", "workload": {"axes": {"M": 1}}}', "no definition 'nope'"),
        ('{"definition": "gemm_n128_k2048", "workload": {"axes": {}}}', "field 'M' is missing"),
        ('{"definition": "gemm_n128_k2048", "workload": {"axes": {"M": 0}}}', "field 'M' is 0"),
        (
            '{"definition": "gemm_n128_k2048", "workload": {"axes": {"M": 1.5}}}',
            "field 'M' must be an integer",
        ),
    ],
)
def test_broken_workloads_name_the_line(line: str, message: str, trace: Path) -> None:
    path = trace / "workloads" / "gemm_n128_k2048.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(UsageError) as caught:
        load_workload(trace)
    assert message in caught.value.message
    assert "gemm_n128_k2048.jsonl, line 2" in caught.value.message


def test_no_gemm_and_options_for_models_only(trace: Path) -> None:
    with pytest.raises(UsageError, match="'fuse' is for model configs"):
        load_workload(trace, fuse=True)
    with pytest.raises(UsageError, match="'tp' is for model configs"):
        load_workload(trace, tp=2)
    shutil.rmtree(trace / "workloads")
    for path in (trace / "definitions").iterdir():
        path.write_text(path.read_text().replace('"op_type": "gemm"', '"op_type": "rope"'))
    with pytest.raises(UsageError, match="no definition of a GEMM"):
        load_workload(trace)
