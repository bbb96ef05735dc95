"""Record files: they read back, stay small, and complain with file and line; CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmcache.environment import Environment, Toolchain
from gemmcache.errors import GemmcacheError, IncompatibleError, IntegrityError, StorageError, UsageError
from gemmcache.kernels.interface import Config
from gemmcache.problem import ProblemFamily
from gemmcache.records import files
from gemmcache.records.interchange import MAX_LINE_BYTES, dump_jsonl, read_jsonl, rounded, write_jsonl
from gemmcache.records.interface import FAILED, KERNEL, LIBRARY, OK, MeasurementPolicy, Trial, TuningRecord
from gemmcache.records.spreadsheet import dump_csv, write_csv
from gemmcache.target import TARGETS
from tests.strategies import tuning_records


def a_record(m: int = 16, n: int = 4096, driver: str = "580.1") -> TuningRecord:
    trials = tuple(
        Trial(
            Config.of("hopper", tile_m=64, tile_n=8 * i),
            OK,
            tuple(7.123456 + i + s / 9 for s in range(9)),
            0.0012345,
        )
        for i in range(1, 7)
    )
    failed = Trial(Config.of("hopper", tile_m=512), FAILED, detail="=too much shared memory")
    return TuningRecord(
        problem=ProblemFamily.of(n, 4096).at(m),
        environment=Environment(TARGETS["h200"], Toolchain(dsl="4.8.1"), driver=driver),
        policy=MeasurementPolicy(),
        choice=KERNEL,
        trials=(*trials, failed),
        baseline="torch.mm",
        baseline_us=(20.000123, 20.1),
        measured_at="2026-12-01T12:00:00Z",
        conditions=(("power_w", 512.34567),),
    )


def lines_of(*records: TuningRecord) -> list[bytes]:
    return list(dump_jsonl(records))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(tuning_records(), max_size=3, unique_by=lambda r: r.digest))
def test_what_is_written_reads_back_rounded(tmp_path_factory, records: list[TuningRecord]) -> None:
    path = tmp_path_factory.mktemp("files") / "records.jsonl"
    write_jsonl(path, records)
    back = list(read_jsonl(path))
    assert {r.digest: r for r in back} == {r.digest: rounded(r) for r in records}
    # A second trip changes nothing, not a byte.
    again = path.with_name("again.jsonl")
    write_jsonl(again, reversed(back))
    assert again.read_bytes() == path.read_bytes()


def test_rounding_keeps_nanoseconds_and_what_the_record_says() -> None:
    short = rounded(a_record())
    assert short.trials[0].samples_us[0] == 8.123
    assert short.trials[0].error == 0.001234
    assert short.baseline_us[0] == 20.0
    assert short.conditions == (("power_w", 512.346),)
    config = Config.of("hopper")
    close = replace(a_record(), trials=(Trial(config, OK, (20.0000615,)),), baseline_us=(20.0001,))
    tiny = replace(a_record(), trials=(Trial(config, OK, (0.0001,)),))
    assert (rounded(close), rounded(tiny)) == (close, tiny)


def test_200_records_stay_a_few_hundred_kilobytes(tmp_path: Path) -> None:
    size = write_jsonl(tmp_path / "r.jsonl", [a_record(m=m, n=n) for m in range(1, 21) for n in range(8, 88, 8)])
    assert size == (tmp_path / "r.jsonl").stat().st_size
    assert size < 450_000


def test_lines_are_sorted_maps_and_shared_parts_are_written_once() -> None:
    lines = lines_of(a_record(m=2), a_record(m=1), a_record(m=1, driver="570.1"))
    values = [json.loads(line) for line in lines]
    assert [list(v) for v in values] == [sorted(v) for v in values]
    assert len(values[0]["environments"]) == 2
    assert len(values[0]["policies"]) == 1
    assert [v["problem"]["m"] for v in values[1:]] == [1, 1, 2]
    assert b", " not in b"".join(lines)


def test_whole_records_without_a_header_and_concatenated_files_are_read(tmp_path: Path) -> None:
    one, two = a_record(m=1), a_record(m=2, driver="570.1")
    path = tmp_path / "r.jsonl"
    path.write_bytes(json.dumps(one.to_value()).encode() + b"\r\n\n" + json.dumps(two.to_value()).encode())
    assert list(read_jsonl(path)) == [one, two]
    path.write_bytes(b"".join(lines_of(one) + lines_of(two)))
    assert list(read_jsonl(path)) == [rounded(one), rounded(two)]


def broken(change: str) -> tuple[int, list[bytes]]:
    """Lines with one thing wrong, and the number of the bad line."""
    lines = lines_of(a_record(m=1), a_record(m=2))
    header, value = json.loads(lines[0]), json.loads(lines[1])

    def record(**fields: object) -> tuple[int, list[bytes]]:
        return 2, [lines[0], json.dumps({**value, **fields}).encode() + b"\n", lines[2]]

    def head(**fields: object) -> tuple[int, list[bytes]]:
        return 1, [json.dumps({**header, **fields}).encode() + b"\n", *lines[1:]]

    digest = next(iter(header["environments"]))
    trial = value["trials"][0]
    cases = {
        "no header": lambda: (1, lines[1:]),
        "not JSON": lambda: (2, [lines[0], b"{nonsense}\n", lines[2]]),
        "truncated": lambda: (3, [lines[0], lines[1], lines[2][:-20]]),
        "a list": lambda: (2, [lines[0], b"[1]\n"]),
        "a number": lambda: (2, [lines[0], b"1\n"]),
        "two values": lambda: (2, [lines[0], b"{} {}\n"]),
        "key twice": lambda: (2, [lines[0], lines[1].replace(b'"choice"', b'"baseline":"x","choice"')]),
        "NaN": lambda: (2, [lines[0], lines[1].replace(b"[20.0,", b"[NaN,")]),
        "infinity": lambda: (2, [lines[0], lines[1].replace(b"[20.0,", b"[1e999,")]),
        "huge integer": lambda: (2, [lines[0], lines[1].replace(b"[20.0,", b"[" + b"9" * 5000 + b",")]),
        "not UTF-8": lambda: (2, [lines[0], lines[1].replace(b"torch.mm", b"torch\xff")]),
        "half a character": lambda: (2, [lines[0], lines[1].replace(b"torch.mm", b"\\ud800")]),
        "nesting bomb": lambda: (2, [lines[0], b"[" * 200_000 + b"\n"]),
        "long line": lambda: (2, [lines[0], b'"' + b"x" * MAX_LINE_BYTES + b'"\n']),
        "unknown field": lambda: record(more=1),
        "time": lambda: record(measured_at="yesterday"),
        "no baseline": lambda: record(baseline_us=[]),
        "zero sample": lambda: record(baseline_us=[0.0]),
        "choice": lambda: record(choice="best"),
        "slow winner": lambda: record(baseline_us=[1.0]),
        "unordered config": lambda: record(trials=[{**trial, "config": {"kernel_family": "x", "params": {"a": 1.5}}}]),
        "unknown environment": lambda: record(environment="0" * 64),
        "environment of wrong type": lambda: record(environment=5),
        "other format name": lambda: head(format="something"),
        "wrong digest": lambda: head(environments={"0" * 64: header["environments"][digest]}),
        "wrong policy digest": lambda: head(policies={"0" * 64: next(iter(header["policies"].values()))}),
        "header without version": lambda: head(version=None),
    }
    if change == "?":
        return 0, [name.encode() for name in cases]
    return cases[change]()


@pytest.mark.parametrize("change", [name.decode() for name in broken("?")[1]])
def test_malformed_files_are_refused_with_file_and_line(tmp_path: Path, change: str) -> None:
    path = tmp_path / "r.jsonl"
    number, lines = broken(change)
    path.write_bytes(b"".join(lines))
    with pytest.raises(IntegrityError) as caught:
        list(read_jsonl(path))
    assert caught.value.message.startswith(f"{path}:{number}")


def test_newer_formats_ask_for_an_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for number, (old, new) in ((1, (b'"version":1', b'"version":2')), (2, (b'"format":1', b'"format":2'))):
        path.write_bytes(b"".join(lines_of(a_record())).replace(old, new))
        with pytest.raises(IncompatibleError, match=f"{path.name}:{number}") as caught:
            list(read_jsonl(path))
        assert "upgrade" in caught.value.remedy


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_a_typed_error_or_a_valid_record(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "r.jsonl"
    content = bytearray(b"".join(lines_of(a_record())))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    complaint = ""
    try:
        for record in read_jsonl(path):
            assert TuningRecord.from_value(record.to_value()) == record
    except GemmcacheError as error:
        complaint = error.message
    assert not complaint or str(path) in complaint


def test_reading_is_streaming(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(lines_of(a_record())) + b"nonsense\n")
    reader = read_jsonl(path)
    assert next(reader) == rounded(a_record())
    with pytest.raises(IntegrityError, match=":3"):
        next(reader)


def test_missing_files_and_folders_are_storage_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        list(read_jsonl(tmp_path / "missing.jsonl"))
    with pytest.raises(StorageError):
        list(read_jsonl(tmp_path))
    with pytest.raises(StorageError):
        write_jsonl(tmp_path / "missing" / "r.jsonl", [a_record()])


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space"):
        write_jsonl(path, [a_record()])
    monkeypatch.undo()
    with pytest.raises(UsageError):
        write_jsonl(path, [replace(a_record(), baseline="\ud800")])
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "f", [b"a", b"b"])
    assert (tmp_path / "f").read_bytes() == b"ab"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644


def test_csv_has_a_row_a_trial_and_no_formulas(tmp_path: Path) -> None:
    record = a_record()
    library = replace(a_record(m=99), choice=LIBRARY, trials=())
    write_csv(tmp_path / "r.csv", [library, record])
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert len(rows) == len(record.trials) + 1
    first, failed, last = rows[0], rows[6], rows[7]
    assert (first["m"], first["n"], first["k"], first["rank"], first["us"]) == (
        "16",
        "4096",
        "4096",
        "1",
        "8.568",
    )
    assert (first["product"], first["driver"], first["record"]) == ("NVIDIA H200", "580.1", record.digest)
    assert float(first["x_library"]) == pytest.approx(20.05 / 8.568, abs=1e-3)
    assert (failed["status"], failed["us"], failed["detail"]) == ("failed", "", "'=too much shared memory")
    assert (last["m"], last["choice"], last["rank"]) == ("99", "library", "")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tuning_records())
def test_csv_takes_any_record(record: TuningRecord) -> None:
    text = b"".join(dump_csv([record])).decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == max(1, len(record.trials))
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row.values())
