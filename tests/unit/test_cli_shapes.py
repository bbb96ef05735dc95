"""`gemmcache shapes` through the real entry point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmcache.cli.app import run
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
    for word in ("SOURCE", "--fuse", "--tp", "--dtype", "--m", "--json", "out_dtype"):
        assert word in text


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shapes", "llama-3.1-8b", "--fuse"]) == 0
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    assert captured.err == ""
    assert captured.out.startswith("llama-3.1-8b: 5 families, 70 problems")
    assert lines[1] == ["path", "count", "N", "K", "dtype", "epilogue", "parallel", "ms"]
    qkv = ["model.layers.*.self_attn.qkv_proj", "32", "6144", "4096", "bfloat16", "none", "column", "14"]
    assert lines[2] == qkv
    assert len(lines) == 7


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = _json(capsys, "qwen2.5-7b", "--tp", "2", "--dtype", "fp8", "--m", "1..4")
    assert set(value) == {"name", "fused", "tp", "families", "problems", "layers"}
    assert (value["name"], value["fused"], value["tp"]) == ("qwen2.5-7b", False, 2)
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
        "parallel": "column",
        "family": family.digest,
        "ms": [1, 2, 4],
        "shares": None,
    }


def test_trace_has_shares(capsys: pytest.CaptureFixture[str]) -> None:
    value = _json(capsys, TRACE)
    small, untraced, _ = value["layers"]
    assert small["shares"] == [1 / 25] * 25
    assert len(small["ms"]) == 25
    assert untraced["shares"] is None
    assert value["problems"] == 25 + 14 + 43
    assert _json(capsys, TRACE, "--m", "16,64")["problems"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "nope: no such file or folder"),
        (["llama-3.1-8b", "--m", "8..1"], "--m: '8..1' is not a range"),
        (["llama-3.1-8b", "--tp", "0"], "--tp"),
        (["llama-3.1-8b", "--dtype", "bf17"], "dtype 'bf17' is not known"),
        (["qwen2.5-7b", "--tp", "8"], "query heads, 28"),
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
