"""`gemmcache shapes` through the real entry point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmcache.cli.app import run
from gemmcache.errors import UsageError
from gemmcache.problem import ProblemFamily

TRACE = str(Path(__file__).resolve().parents[1] / "data" / "trace")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMCACHE_CACHE_DIR", str(tmp_path / "cache"))


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["shapes", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shapes", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("SOURCE", "--fuse", "--tp", "--dtype", "--m", "--epilogues", "--json", "proposed_epilogue", "FUSABLE"):
        assert word in text


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shapes", "llama-3.1-8b", "--fuse"]) == 0
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    assert captured.err == ""
    assert captured.out.startswith("llama-3.1-8b: 5 families, 90 problems")
    assert lines[1] == ["path", "count", "N", "K", "dtype", "epilogue", "fusable", "parallel", "ms"]
    qkv = ["model.layers.*.self_attn.qkv_proj", "32", "6144", "4096", "bfloat16", "none", "none", "column", "18"]
    assert lines[2] == qkv
    assert [line[5:7] for line in lines[3:6]] == [["none", "residual"], ["none", "swiglu"], ["none", "residual"]]
    assert len(lines) == 7


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = _json(capsys, "qwen2.5-7b", "--tp", "2", "--dtype", "fp8", "--m", "1..4")
    assert set(value) == {"name", "fused", "tp", "epilogues", "families", "problems", "layers"}
    assert (value["name"], value["fused"], value["tp"], value["epilogues"]) == ("qwen2.5-7b", False, 2, "none")
    assert value["problems"] == 3 * value["families"]
    family = ProblemFamily.of(1792, 3584, "fp8", "bias", "bf16")
    assert value["layers"][0] == {
        "path": "model.layers.*.self_attn.q_proj",
        "count": 28,
        "n": 1792,
        "k": 3584,
        "a_dtype": "float8_e4m3fn",
        "b_dtype": "float8_e4m3fn",
        "out_dtype": "bfloat16",
        "epilogue": "bias",
        "proposed_epilogue": "bias",
        "parallel": "column",
        "family": family.digest,
        "ms": [1, 2, 4],
        "shares": None,
    }


@pytest.mark.parametrize(
    ("choice", "epilogues", "families"),
    [
        ("none", ["none"] * 5, 5),
        ("model", ["none", "residual", "swiglu", "residual", "none"], 5),
        ("both", ["none", "none", "residual", "none", "swiglu", "none", "residual", "none"], 8),
    ],
)
def test_epilogues(choice: str, epilogues: list[str], families: int, capsys: pytest.CaptureFixture[str]) -> None:
    value = _json(capsys, "llama-3.1-8b", "--fuse", "--epilogues", choice, "--m", "1,2")
    assert (value["epilogues"], value["families"], value["problems"]) == (choice, families, 2 * families)
    assert [layer["epilogue"] for layer in value["layers"]] == epilogues
    assert {layer["proposed_epilogue"] for layer in value["layers"]} == {"none", "residual", "swiglu"}
    shapes = {(layer["path"], layer["n"], layer["k"], layer["count"]) for layer in value["layers"]}
    assert ("model.layers.*.mlp.gate_up_proj", 28672, 4096, 32) in shapes
    assert len(shapes) == 5
    family = ProblemFamily.of(28672, 4096, "bf16", epilogues[2])
    assert choice != "model" or value["layers"][2]["family"] == family.digest


def test_what_is_no_model_has_nothing_to_propose(capsys: pytest.CaptureFixture[str]) -> None:
    for choice in ("none", "both"):
        value = _json(capsys, TRACE, "--epilogues", choice)
        assert [layer["proposed_epilogue"] for layer in value["layers"]] == [None] * 3
    assert run(["shapes", TRACE]) == 0
    assert {line.split()[6] for line in capsys.readouterr().out.splitlines()[2:]} == {"-"}


def test_a_forward_pass_that_fails_is_told_and_costs_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmcache.models import watch

    monkeypatch.setattr(watch, "_arguments", lambda *_: {})
    for _ in range(2):  # built, and from the cache
        assert run(["shapes", "bert-base-uncased", "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err.startswith("gemmcache: bert-base-uncased: the proposed epilogues of 74 of 74 linear layers")
        assert captured.err.count("\n") == 1
        found = {layer["path"]: layer["proposed_epilogue"] for layer in json.loads(captured.out)["layers"]}
        assert found["bert.encoder.layer.*.intermediate.dense"] == "bias+gelu"


@pytest.mark.parametrize("name", ["tune", "build"])
@pytest.mark.parametrize(("options", "expected"), [([], "none"), (["--epilogues", "both"], "both")])
def test_tune_and_build_take_the_same_epilogues(
    name: str, options: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(*arguments: object) -> None:
        raise UsageError(f"seen {arguments}")

    monkeypatch.setattr(f"gemmcache.cli.{name}.workload_of", seen)
    monkeypatch.setattr("gemmcache.kernels.identity.detect_toolchain", lambda families: None)
    needed = ["--out", "nowhere", "--target", "h200"] if name == "build" else []
    assert run([name, "llama-3.1-8b", "--fuse", *options, *needed]) == 2
    assert f"seen ('llama-3.1-8b', True, 1, None, '{expected}')" in capsys.readouterr().err


def test_trace_has_shares(capsys: pytest.CaptureFixture[str]) -> None:
    value = _json(capsys, TRACE)
    small, untraced, _ = value["layers"]
    assert small["shares"] == [1 / 25] * 25
    assert len(small["ms"]) == 25
    assert untraced["shares"] is None
    assert value["problems"] == 25 + 18 + 43
    assert _json(capsys, TRACE, "--m", "16,64")["problems"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "nope: no such file or folder"),
        (["llama-3.1-8b", "--m", "8..1"], "--m: '8..1' is not a range"),
        (["llama-3.1-8b", "--tp", "0"], "--tp"),
        (["llama-3.1-8b", "--dtype", "bf17"], "dtype 'bf17' is not known"),
        (["qwen2.5-7b", "--tp", "8"], "query heads, 28"),
        (["qwen2.5-7b", "--epilogues", "all"], "--epilogues"),
        ([TRACE, "--fuse"], "'fuse' is for model configs"),
        ([], "SOURCE"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shapes", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shapes", "nope", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["error"] == "UsageError"
    assert "llama-3.1-8b" in error["remedy"]
