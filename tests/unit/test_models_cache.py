"""The cache of workloads: hits without transformers, damage, and places that can't be written to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemmcache.models import build, cache, huggingface
from gemmcache.models.cache import WorkloadCache, key_of
from gemmcache.models.interface import Layer, Workload
from gemmcache.models.source import load_workload
from gemmcache.problem import ProblemFamily

WORKLOAD = Workload("w", (Layer("a", ProblemFamily.of(8, 16), 2),))
KEY = key_of(b"{}", {"tp": 1}, "5.0")

_SCRIPT = """
import sys
if sys.argv[1] == "hit":
    sys.modules["transformers"] = sys.modules["torch"] = None
from gemmcache.models.source import load_workload
print(len(load_workload("llama-3.1-8b", fuse=True).layers))
"""


def _run(kind: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    environment = {**environment, "PYTHONPATH": str(root), "PATH": os.environ["PATH"]}
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT, kind], env=environment, capture_output=True, text=True, check=False
    )


def test_a_hit_imports_neither_transformers_nor_torch_and_all_is_quiet(tmp_path: Path) -> None:
    environment = {"GEMMCACHE_CACHE_DIR": str(tmp_path)}
    assert "MissingPackageError" in _run("hit", environment).stderr  # nothing is there yet
    for kind in ("miss", "hit"):
        done = _run(kind, environment)
        assert (done.stdout, done.stderr, done.returncode) == ("5\n", "", 0)


@pytest.mark.parametrize(
    "other",
    [
        (b"{ }", {"tp": 1}, "5.0"),
        (b"{}", {"tp": 2}, "5.0"),
        (b"{}", {"tp": 1, "fuse": True}, "5.0"),
        (b"{}", {"tp": 1}, "5.1"),
    ],
)
def test_the_key_has_every_input(other: tuple[bytes, dict[str, object], str]) -> None:
    assert key_of(*other) != KEY


def test_the_key_has_version_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "__version__", "99")
    changed = key_of(b"{}", {"tp": 1}, "5.0")
    monkeypatch.undo()
    monkeypatch.setattr(cache, "_sources_digest", lambda: "other")
    assert len({KEY, changed, key_of(b"{}", {"tp": 1}, "5.0")}) == 3


def test_put_and_get(tmp_path: Path) -> None:
    store = WorkloadCache(tmp_path / "deep" / "folder")
    assert store.get(KEY) is None
    store.put(KEY, WORKLOAD)
    assert store.get(KEY) == WORKLOAD
    assert [p.name for p in (tmp_path / "deep" / "folder").iterdir()] == [f"{KEY}.bin"]


def test_any_damage_is_a_miss(tmp_path: Path) -> None:
    store = WorkloadCache(tmp_path)
    store.put(KEY, WORKLOAD)
    path = tmp_path / f"{KEY}.bin"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert store.get(KEY) is None
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        assert store.get(KEY) is None
    path.write_bytes(whole)
    assert store.get(KEY) == WORKLOAD
    other = KEY[::-1]
    (tmp_path / f"{other}.bin").write_bytes(whole)
    assert store.get(other) is None
    path.unlink()
    path.mkdir()
    assert store.get(KEY) is None
    store.put(KEY, WORKLOAD)  # can't replace a directory; not an error
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".new")] == []


def test_a_damaged_entry_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_workload("bert-base-uncased", cache_dir=tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole.replace(b"uncased", b"untased"))
    assert load_workload("bert-base-uncased", cache_dir=tmp_path) == first
    assert entry.read_bytes() == whole
    monkeypatch.setattr(build, "build_model", lambda *_: pytest.fail("built again"))
    assert load_workload("bert-base-uncased", cache_dir=tmp_path) == first


@pytest.mark.parametrize("folder", ["/dev/null/x", "/proc/none/x"])
def test_a_place_that_cannot_be_written_to_is_no_error(folder: str) -> None:
    assert len(load_workload("bert-base-uncased", cache_dir=Path(folder)).layers) == 8


def test_no_directory_at_all_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    for variable in ("HOME", "XDG_CACHE_HOME", "GEMMCACHE_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    assert len(load_workload("bert-base-uncased").layers) == 8


def test_same_bytes_under_another_name_keep_their_name(tmp_path: Path) -> None:
    config = {"model_type": "bert", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "vocab_size": 8}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        assert load_workload(tmp_path / name, cache_dir=tmp_path / "cache").name == name


def test_options_reach_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    monkeypatch.setattr(huggingface, "key_of", lambda *parts: seen.add(repr(parts)) or key_of(*parts))
    for options in ({}, {"fuse": True}, {"tp": 2}, {"dtype": "fp16"}):
        load_workload("bert-base-uncased", cache_dir=tmp_path, **options)
    assert len(seen) == 4
    assert len(list(tmp_path.iterdir())) == 4
