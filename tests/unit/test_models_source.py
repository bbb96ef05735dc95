"""What counts as a source, and what is said about anything else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gemmcache.errors import UsageError
from gemmcache.models import files
from gemmcache.models.shipped import shipped_models
from gemmcache.models.source import load_workload


def test_name_folder_and_file_are_the_same_source(tmp_path: Path) -> None:
    path = shipped_models()["llama-3.1-8b"]
    by_name = load_workload("llama-3.1-8b", cache_dir=tmp_path)
    assert load_workload(path, cache_dir=tmp_path) == by_name
    assert load_workload(str(path.parent), cache_dir=tmp_path) == by_name


def test_a_config_under_another_file_name(tmp_path: Path) -> None:
    path = tmp_path / "small-bert.json"
    path.write_bytes(shipped_models()["bert-base-uncased"].read_bytes())
    assert load_workload(path, cache_dir=tmp_path / "c").name == "small-bert"


def test_the_current_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_bytes(shipped_models()["bert-base-uncased"].read_bytes())
    monkeypatch.chdir(tmp_path / "here")
    assert load_workload(".", cache_dir=tmp_path / "c").name == "here"


def test_a_path_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-3.1-8b").write_text('[{"n": 8, "k": 8}]')
    monkeypatch.chdir(tmp_path)
    assert load_workload("llama-3.1-8b").layers[0].family.n == 8


@pytest.mark.parametrize("name", ["llama-3.1-9b", "no/such/config.json", "../models/llama-3.1-8b", ""])
def test_missing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_workload(name)
    if name:
        assert f"{name}: no such file or folder" in caught.value.message
        assert "llama-3.1-8b" in caught.value.remedy
    assert "config.json" in caught.value.remedy


def test_other_kinds_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"neither config\.json nor definitions/"):
        load_workload(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="not a regular file"):
        load_workload(tmp_path / "fifo")
    (tmp_path / "model.safetensors").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UsageError, match="not valid JSON"):
        load_workload(tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError):
        load_workload(tmp_path)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 3)
    with pytest.raises(UsageError, match="larger than"):
        load_workload(tmp_path / "model.safetensors")


@pytest.mark.parametrize("tp", [0, -1, True, 1.5, "2"])
def test_bad_ranks(tp: Any) -> None:
    with pytest.raises(UsageError, match="number of ranks"):
        load_workload("llama-3.1-8b", tp=tp)


def test_bad_dtype() -> None:
    with pytest.raises(UsageError, match="dtype 'float12' is not known"):
        load_workload("llama-3.1-8b", dtype="float12")
