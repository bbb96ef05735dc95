"""`gemmcache records`: what each command prints, writes and ends with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gemmcache.cli.app import run
from gemmcache.environment import Environment, Toolchain
from gemmcache.kernels.interface import Config
from gemmcache.problem import ProblemFamily
from gemmcache.records import layers
from gemmcache.records.interchange import read_jsonl, write_jsonl
from gemmcache.records.interface import FAILED, KERNEL, LIBRARY, OK, MeasurementPolicy, Trial, TuningRecord
from gemmcache.records.store import RecordStore
from gemmcache.target import TARGETS


def a_record(m: int, target: str = "h200", at: str = "2026-06-01T00:00:00Z", us: float = 8.0) -> TuningRecord:
    return TuningRecord(
        problem=ProblemFamily.of(4096, 4096).at(m),
        environment=Environment(TARGETS[target], Toolchain(dsl="4.8.1"), driver="580.1"),
        policy=MeasurementPolicy(),
        choice=KERNEL,
        trials=(
            Trial(Config.of("hopper", tile=64), OK, (us,), 0.001),
            Trial(Config.of("hopper"), FAILED, detail="hung"),
        ),
        baseline="torch.mm",
        baseline_us=(10.0,),
        measured_at=at,
    )


MINE, H20, SHIPPED = a_record(16), a_record(16, "h20"), a_record(32)
LIBRARY_WINS = replace(a_record(64), choice=LIBRARY, trials=())


@pytest.fixture
def mine(tmp_path: Path, monkeypatch) -> Path:
    """A user's folder with three records, and one shipped record."""
    folder = tmp_path / "mine"
    with RecordStore(folder) as store:
        store.put_many([MINE, H20, LIBRARY_WINS])
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    write_jsonl(shipped / "a.jsonl", [SHIPPED])
    monkeypatch.setattr(layers, "shipped_records_dir", lambda: shipped)
    monkeypatch.setenv("GEMMCACHE_RECORDS_DIR", str(folder))
    return folder


def test_ls_shows_both_layers(mine: Path, capsys) -> None:
    assert run(["records", "ls"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[2:] if line.strip()]
    assert len(rows) == 4
    for record in (MINE, H20, LIBRARY_WINS, SHIPPED):
        (row,) = [r for r in rows if record.digest.startswith(r[0])]
        assert len(row[0]) == 12
        assert row[-2:] == ["580.1", "shipped" if record is SHIPPED else "user"]
        assert row[-3] == ("1.000" if record is LIBRARY_WINS else "1.250")


def test_ls_json_and_filters(mine: Path, capsys) -> None:
    def listed(*args: str) -> list[str]:
        assert run(["records", "ls", "--json", *args]) == 0
        return [r["digest"] for r in json.loads(capsys.readouterr().out)["records"]]

    assert set(listed()) == {MINE.digest, H20.digest, LIBRARY_WINS.digest, SHIPPED.digest}
    assert listed("--target", "h20") == [H20.digest]
    assert listed("--layer", "shipped") == [SHIPPED.digest]
    assert listed("--target", "b200") == []
    assert run(["records", "ls", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    (entry,) = [r for r in body["records"] if r["digest"] == MINE.digest]
    assert (entry["us"], entry["library_us"], entry["x_library"]) == (8.0, 10.0, 1.25)
    assert (entry["config"], entry["layer"], entry["driver"]) == ("hopper[tile=64]", "user", "580.1")
    assert run(["records", "ls", "--target", "nonsense"]) == 2


def test_ls_of_no_folder_lists_shipped_and_makes_none(mine: Path, tmp_path: Path, capsys) -> None:
    assert run(["records", "ls", "--json", "--records", str(tmp_path / "none")]) == 0
    assert [r["digest"] for r in json.loads(capsys.readouterr().out)["records"]] == [SHIPPED.digest]
    assert not (tmp_path / "none").exists()


def test_ls_reports_quarantined_rows(mine: Path, capsys) -> None:
    with RecordStore(mine) as store:
        store._connection().execute("UPDATE Cache SET mode = 4 WHERE key = ?", (MINE.slot,))
    assert run(["records", "ls"]) == 0
    captured = capsys.readouterr()
    assert "not used" in captured.err
    assert MINE.digest[:12] not in captured.out
    assert run(["records", "ls", "--json"]) == 0
    (bad,) = json.loads(capsys.readouterr().out)["quarantined"]
    assert "mode" in bad["reason"]


def test_show_has_every_trial(mine: Path, capsys) -> None:
    assert run(["records", "show", MINE.digest[:8].upper()]) == 0
    out = capsys.readouterr().out
    for text in (
        MINE.digest,
        "16x4096x4096",
        "NVIDIA H200",
        "580.1",
        "hopper[tile=64]",
        "hung",
        "1.250",
        "user",
    ):
        assert text in out
    assert run(["records", "show", SHIPPED.digest, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["layer"] == "shipped"
    assert TuningRecord.from_value(body["record"]) == SHIPPED


def test_text_of_a_record_is_shown_without_markup_or_control_codes(tmp_path: Path, capsys) -> None:
    trial = Trial(Config.of("hopper", tile=1), FAILED, detail="[/bold]\x1b[2J[red]x[/red]")
    record = replace(LIBRARY_WINS, trials=(trial,), baseline="\x1b]0;title\x07", policy=MeasurementPolicy(seed=7))
    with RecordStore(tmp_path) as store:
        store.put(record)
    for command in (["ls"], ["show", record.digest]):
        assert run(["records", *command, "--records", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
    assert "[/bold]" in out
    assert "[red]x[/red]" in out


@pytest.mark.parametrize(
    ("prefix", "code", "text"),
    [("0000000", 1, "no record"), ("xyz!", 2, "not the beginning"), ("ab", 2, "4 to 64")],
)
def test_a_prefix_that_names_no_record(mine: Path, capsys, prefix: str, code: int, text: str) -> None:
    for command in (["show", prefix], ["rm", "--yes", prefix]):
        assert run(["records", *command]) == code
        assert text in capsys.readouterr().err


def test_an_ambiguous_prefix_asks_for_more(tmp_path: Path, monkeypatch, capsys) -> None:
    many = {r.digest[:4]: r for r in (a_record(m) for m in range(1, 1200))}
    pair: list[TuningRecord] = []
    for m in range(1, 1200):
        record = a_record(m)
        if many[record.digest[:4]] != record:
            pair = [record, many[record.digest[:4]]]
            break
    assert pair, "two of 1199 digests share 4 digits"
    with RecordStore(tmp_path) as store:
        store.put_many(pair)
    assert run(["records", "show", pair[0].digest[:4], "--records", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "2 records" in err
    assert pair[1].digest[:16] in err


def test_export_then_import_into_another_folder(mine: Path, tmp_path: Path, capsys) -> None:
    file, other = tmp_path / "out.jsonl", tmp_path / "other"
    assert run(["records", "export", str(file)]) == 0
    assert {r.digest for r in read_jsonl(file)} == {MINE.digest, H20.digest, LIBRARY_WINS.digest}
    capsys.readouterr()
    assert run(["records", "import", str(file), "--records", str(other), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (len(body["new"]), body["replaced"], body["kept"]) == (3, [], [])
    with RecordStore(other) as store:
        assert set(store.all()) == {MINE, H20, LIBRARY_WINS}


def test_export_selects(mine: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    assert run(["records", "export", str(file), "--target", "h200", "--shipped"]) == 0
    assert {r.digest for r in read_jsonl(file)} == {MINE.digest, LIBRARY_WINS.digest, SHIPPED.digest}
    for args in ([str(tmp_path / "t.csv")], [str(tmp_path / "u.txt"), "--format", "csv"]):
        assert run(["records", "export", *args]) == 0
        assert Path(args[0]).read_text().count("\n") == 1 + 2 + 2 + 1


def test_import_is_all_or_nothing_and_names_the_line(mine: Path, tmp_path: Path, capsys) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write_jsonl(good, [SHIPPED])
    bad.write_bytes(good.read_bytes() + b"nonsense\n")
    assert run(["records", "import", str(good), str(bad)]) == 3
    assert f"{bad}:3" in capsys.readouterr().err
    with RecordStore(mine) as store:
        assert SHIPPED not in store.all()
    assert run(["records", "import", str(tmp_path / "missing.jsonl")]) == 2


def test_merge_takes_stores_files_and_folders_of_files(mine: Path, tmp_path: Path, capsys) -> None:
    newer = a_record(16, at="2026-07-01T00:00:00Z", us=7.0)
    older = replace(H20, measured_at="2020-01-01T00:00:00Z")
    with RecordStore(tmp_path / "theirs") as store:
        store.put_many([newer, older])
    (tmp_path / "files" / "deep").mkdir(parents=True)
    write_jsonl(tmp_path / "files" / "deep" / "a.jsonl", [a_record(128)])
    write_jsonl(tmp_path / "one.jsonl", [a_record(256)])
    sources = [str(tmp_path / name) for name in ("theirs", "files", "one.jsonl")]
    assert run(["records", "merge", *sources]) == 0
    out = capsys.readouterr().out.split("\n")
    assert [line.split() for line in out if not line.startswith(" ")][:3] == [
        ["new", "2"],
        ["replaced", "1"],
        ["kept", "1"],
    ]
    with RecordStore(mine) as store:
        assert set(store.all()) == {newer, H20, LIBRARY_WINS, a_record(128), a_record(256)}


def test_merge_of_nothing_is_an_error(mine: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["records", "merge", str(tmp_path / "empty")]) == 2
    assert run(["records", "merge", str(tmp_path / "missing")]) == 5
    assert run(["records", "merge"]) == 2


def test_merge_reports_bad_rows_of_the_source(mine: Path, tmp_path: Path, capsys) -> None:
    with RecordStore(tmp_path / "theirs") as store:
        store.put_many([a_record(128), a_record(256)])
        store._connection().execute("UPDATE Cache SET filename = '/etc/passwd' WHERE key = ?", (a_record(256).slot,))
    assert run(["records", "merge", str(tmp_path / "theirs")]) == 0
    assert "not merged" in capsys.readouterr().err
    with RecordStore(mine) as store:
        assert a_record(128) in store.all()
        assert a_record(256) not in store.all()


def test_rm_asks_and_removes_only_the_users(mine: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("click.confirm", lambda *_args, **_kwargs: False)
    assert run(["records", "rm", MINE.digest[:12]]) == 1
    assert run(["records", "rm", SHIPPED.digest[:12], "--yes"]) == 2
    assert "shipped" in capsys.readouterr().err
    assert run(["records", "rm", MINE.digest[:12], H20.digest, MINE.digest, "--yes", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["removed"]) == {MINE.digest, H20.digest}
    with RecordStore(mine) as store:
        assert store.all() == (LIBRARY_WINS,)


def test_a_damaged_database_ends_with_the_integrity_code(mine: Path, capsys) -> None:
    (mine / "cache.db").write_bytes(b"garbage" * 1000)
    assert run(["records", "ls", "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["error"] == "IntegrityError"
    assert "try:" in captured.err
