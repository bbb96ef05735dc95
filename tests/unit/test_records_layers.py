"""The user's records on top of shipped ones: which record is served, and what is opened for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gemmcache.environment import Environment, Toolchain
from gemmcache.errors import IntegrityError, StorageError
from gemmcache.kernels.interface import Config
from gemmcache.problem import ProblemFamily
from gemmcache.records import layers
from gemmcache.records.interchange import write_jsonl
from gemmcache.records.interface import KERNEL, OK, MeasurementPolicy, Trial, TuningRecord
from gemmcache.records.layers import SHIPPED, USER, Records, read_folder, shipped_records_dir
from gemmcache.target import TARGETS, Target

H200, H20 = TARGETS["h200"], TARGETS["h20"]


def a_record(
    m: int = 16,
    driver: str = "580.1",
    at: str = "2026-06-01T00:00:00Z",
    target: Target = H200,
    kernel_family: str = "hopper",
    trials: int = 1,
) -> TuningRecord:
    return TuningRecord(
        problem=ProblemFamily.of(4096, 4096).at(m),
        environment=Environment(target, Toolchain(dsl="4.8.1"), driver=driver),
        policy=MeasurementPolicy(),
        choice=KERNEL,
        trials=tuple(Trial(Config.of(kernel_family, tile=i), OK, (8.0 + i,) * 9, 0.001) for i in range(trials)),
        baseline="torch.mm",
        baseline_us=(10.0,) * 9,
        measured_at=at,
    )


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    folder = tmp_path / "shipped" / "h200"
    folder.mkdir(parents=True)
    return folder


def test_the_users_records_go_first(tmp_path: Path, shipped: Path) -> None:
    theirs, other = a_record(at="2026-12-01T00:00:00Z"), a_record(m=32)
    write_jsonl(shipped / "a.jsonl", [theirs, other])
    mine = a_record(driver="570.1", at="2026-01-01T00:00:00Z")
    with Records.open(tmp_path / "mine", shipped.parent) as records:
        assert records.lookup(mine.problem, H200) == theirs
        records.put(mine)
        assert records.lookup(mine.problem, H200) == mine
        assert records.lookup(mine.problem, H200, theirs.environment) == mine
        assert records.lookup(other.problem, H200) == other
        assert [(f.record, f.layer) for f in records.all()] == [
            (mine, USER),
            (theirs, SHIPPED),
            (other, SHIPPED),
        ]
        found = records.find(other.problem, H200)
        assert found is not None
        assert found.layer == SHIPPED
        assert records.hides_newer([mine, other]) == 1
        assert records.hides_newer([a_record(at="2027-01-01T00:00:00Z")]) == 0


def test_a_record_in_both_layers_is_listed_once(tmp_path: Path, shipped: Path) -> None:
    write_jsonl(shipped / "a.jsonl", [a_record(at="2026-12-01T00:00:00Z")])
    with Records.open(tmp_path / "mine", shipped.parent) as records:
        records.put(a_record())
        assert [(f.record, f.layer) for f in records.all()] == [(a_record(), USER)]


@pytest.mark.parametrize("where", ["user", "shipped"])
def test_the_same_environment_goes_before_a_newer_record(tmp_path: Path, shipped: Path, where: str) -> None:
    old, middle = (
        a_record(driver="1", at="2026-01-01T00:00:00Z"),
        a_record(driver="2", at="2026-02-01T00:00:00Z"),
    )
    new = a_record(driver="3", at="2026-03-01T00:00:00Z")
    with Records.open(tmp_path / "mine", shipped.parent) as records:
        if where == "user":
            records.put_many([middle, new, old])
        else:
            write_jsonl(shipped / "a.jsonl", [middle, new])
            write_jsonl(shipped / "b.jsonl", [old])
        for environment, expected in (
            (old.environment, old),
            (middle.environment, middle),
            (None, new),
            (replace(old.environment, driver="4"), new),
        ):
            assert records.lookup(new.problem, H200, environment) == expected


@pytest.mark.parametrize("where", ["user", "shipped"])
def test_another_products_record_is_never_served(tmp_path: Path, shipped: Path, where: str) -> None:
    mig = Target("sm_90a", 16, H200.l2_bytes, H200.smem_bytes, "NVIDIA H200 MIG 1g.18gb")
    others = [
        H20,
        mig,
        replace(H200, sm_count=131),
        replace(H200, arch="sm_90"),
        replace(H200, product="NVIDIA H100"),
    ]
    record = a_record()
    with Records.open(tmp_path / "mine", shipped.parent) as records:
        if where == "user":
            records.put(record)
        else:
            write_jsonl(shipped / "a.jsonl", [record])
        assert records.lookup(record.problem, H200) == record
        for other in others:
            assert records.lookup(record.problem, other) is None
            assert records.lookup(record.problem, other, record.environment) is None
        assert records.lookup(a_record(m=15).problem, H200) is None


def test_records_of_unknown_kernel_families_are_returned(tmp_path: Path, shipped: Path) -> None:
    record = a_record(kernel_family="not_installed_here")
    write_jsonl(shipped / "a.jsonl", [record])
    with Records.open(tmp_path / "mine", shipped.parent) as records:
        assert records.lookup(record.problem, H200) == record
        records.put(record)
        assert records.lookup(record.problem, H200) == record


def test_reading_shipped_records_imports_no_diskcache_and_makes_no_folder(tmp_path: Path, shipped: Path) -> None:
    write_jsonl(shipped / "a.jsonl", [a_record()])
    script = (
        "import sys; sys.modules['diskcache'] = None\n"
        "from gemmcache.records.layers import Records\n"
        "from gemmcache.problem import ProblemFamily\n"
        "from gemmcache.target import TARGETS\n"
        f"with Records.open({str(tmp_path / 'mine')!r}, {str(shipped)!r}) as records:\n"
        "    assert records.lookup(ProblemFamily.of(4096, 4096).at(16), TARGETS['h200'])\n"
        "    assert len(records.all()) == 1\n"
        "assert 'torch' not in sys.modules and 'click' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mine").exists()


def test_read_only_layers_write_nothing(tmp_path: Path) -> None:
    with Records.open(tmp_path / "mine", shipped=False, read_only=True) as records:
        assert records.lookup(a_record().problem, H200) is None
        assert records.remove("0" * 64) == ()
        with pytest.raises(StorageError):
            records.put(a_record())
    assert not (tmp_path / "mine").exists()
    with Records.open(tmp_path / "mine", shipped=False) as records:
        records.put(a_record())
    with Records.open(tmp_path / "mine", shipped=False, read_only=True) as records:
        assert len(records.all()) == 1


def test_a_store_that_appears_later_is_found(tmp_path: Path) -> None:
    with Records.open(tmp_path, shipped=False) as reader, Records.open(tmp_path, shipped=False) as writer:
        assert reader.lookup(a_record().problem, H200) is None
        writer.put(a_record())
        assert reader.lookup(a_record().problem, H200) == a_record()


def test_the_default_folder_is_the_users(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GEMMCACHE_RECORDS_DIR", str(tmp_path / "own"))
    with Records.open(shipped=False) as records:
        records.put(a_record())
    assert (tmp_path / "own" / "cache.db").exists()


def test_shipped_files_are_read_again_only_when_one_changes(tmp_path: Path, shipped: Path, monkeypatch) -> None:
    write_jsonl(shipped / "a.jsonl", [a_record()])
    first = read_folder(shipped)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "read_jsonl", None)
        assert read_folder(shipped) is first
    write_jsonl(shipped / "b.jsonl", [a_record(m=32)])
    assert len(read_folder(shipped).all()) == 2
    (shipped / "a.jsonl").write_text("{}\n")
    with pytest.raises(IntegrityError, match=r"a\.jsonl:1"):
        read_folder(shipped)


def test_of_one_digest_in_two_files_the_newer_counts(shipped: Path) -> None:
    old, new = a_record(at="2026-01-01T00:00:00Z"), a_record(at="2026-01-02T00:00:00Z")
    for first, second in ((old, new), (new, old)):
        write_jsonl(shipped / "a.jsonl", [first])
        write_jsonl(shipped / "b.jsonl", [second])
        assert read_folder(shipped).all() == (new,)


def test_shipped_records_of_this_installation_are_valid() -> None:
    folder = shipped_records_dir()
    if folder is not None:
        for record in read_folder(folder).all():
            assert record.trials or record.choice != KERNEL


def test_500_shipped_records_load_fast(shipped: Path) -> None:
    write_jsonl(shipped / "a.jsonl", [a_record(m=m, trials=2) for m in range(1, 501)])
    start = time.process_time()
    assert len(read_folder(shipped).all()) == 500
    # About 0.08 s of CPU; the margin is for slow machines.
    assert time.process_time() - start < 1.0
