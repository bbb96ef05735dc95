"""Records as text files: JSON lines to exchange and to ship, CSV for spreadsheets.

A `.jsonl` file has one JSON map a line, keys sorted. A header line, whose `format` is the text
`gemmcache-records`, defines environments and policies by digest for the lines after it; every other line is a
record, whose `environment` and `policy` are such digests or whole maps. So files can be concatenated.
Samples are rounded to nanoseconds on writing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from gemmcache import codec
from gemmcache.environment import Environment
from gemmcache.errors import GemmcacheError, IncompatibleError, IntegrityError, StorageError, UsageError
from gemmcache.records.content import measured_time
from gemmcache.records.files import write_atomically
from gemmcache.records.interface import RECORD_FORMAT, MeasurementPolicy, TuningRecord

FORMAT = "gemmcache-records"
VERSION = 1

#: The most bytes of one line.
MAX_LINE_BYTES = 4 << 20


def policy_digest(policy: MeasurementPolicy) -> str:
    """sha256 that names a measurement policy in a file."""
    return codec.digest("measurement-policy", policy.to_value())


def rounded(record: TuningRecord) -> TuningRecord:
    """`record` with samples in whole nanoseconds and errors of 4 digits; itself where rounding would change
    what it says (samples below a nanosecond, a winner ahead by less)."""
    short = replace(
        record,
        trials=tuple(
            replace(
                t,
                samples_us=tuple(round(s, 3) for s in t.samples_us),
                error=None if t.error is None else float(f"{t.error:.4g}"),
            )
            for t in record.trials
        ),
        baseline_us=tuple(round(s, 3) for s in record.baseline_us),
        conditions=tuple((name, round(value, 3)) for name, value in record.conditions),
    )
    try:
        return TuningRecord.from_value(short.to_value())
    except IntegrityError:
        return record


def record_key(record: TuningRecord) -> tuple[str, str, int, str]:
    """Sort key: target, family of problems, m and digest."""
    return str(record.environment.target), str(record.problem.family), record.problem.m, record.digest


def export_order(records: Iterable[TuningRecord]) -> list[TuningRecord]:
    """`records` in the order of `record_key`, so that files of like records differ in few lines."""
    return sorted(records, key=record_key)


def dump_jsonl(records: Iterable[TuningRecord]) -> Iterator[bytes]:
    """The lines of a file with `records`, header first. Raises `UsageError` for what can't be read back."""
    ordered = [rounded(r) for r in export_order(records)]
    environments = {r.environment.digest: r.environment.to_value() for r in ordered}
    policies = {policy_digest(r.policy): r.policy.to_value() for r in ordered}
    yield _line({"format": FORMAT, "version": VERSION, "environments": environments, "policies": policies})
    for record in ordered:
        value = record.to_value()
        value["environment"] = record.environment.digest
        value["policy"] = policy_digest(record.policy)
        yield _line(value)


def _line(value: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        line = text.encode() + b"\n"
    except ValueError as error:
        raise UsageError(f"a record can't be written as JSON: {error}") from error
    if len(line) > MAX_LINE_BYTES:
        raise UsageError(
            f"a line of {len(line)} bytes is more than the {MAX_LINE_BYTES} allowed", remedy="export fewer"
        )
    return line


def write_jsonl(path: Path, records: Iterable[TuningRecord]) -> int:
    """Writes `records` to `path`, atomically; returns its bytes. Raises `StorageError`, `UsageError`."""
    return write_atomically(path, dump_jsonl(records))


def read_jsonl(path: Path) -> Iterator[TuningRecord]:
    """The records of a file, one by one, each checked; memory is bounded by the longest line allowed.

    Raises `StorageError` if the file can't be read, `IntegrityError` with file and line for anything
    malformed, `IncompatibleError` for a newer format.
    """
    try:
        with path.open("rb") as file:
            yield from _Reader(str(path)).read(file)
    except OSError as error:
        if isinstance(error, GemmcacheError):
            raise
        raise StorageError(f"{path} can't be read: {error.strerror or error}", remedy="check the path") from error


@dataclass(slots=True)
class _Reader:
    """One file, with what its header lines have defined so far, by digest."""

    name: str
    environments: dict[str, Any] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)

    def read(self, file: BinaryIO) -> Iterator[TuningRecord]:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{self.name}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise IntegrityError(f"{where}: line is longer than {MAX_LINE_BYTES} bytes")
            if not line.strip():
                continue
            value = _parse(line, where)
            try:
                if isinstance(value, dict) and isinstance(value.get("format"), str):
                    self._header(codec.Fields(value, where))
                    continue
                record = self._record(value, where)
            except UsageError as error:
                raise IntegrityError(f"{where}: {error.message}") from error
            yield record

    def _header(self, fields: codec.Fields) -> None:
        if fields.text("format") != FORMAT:
            raise fields.fail("format", f"is not '{FORMAT}'")
        version = fields.integer("version", low=1)
        if version > VERSION:
            raise IncompatibleError(
                f"{fields.where}: file format {version}, this gemmcache reads {VERSION}",
                remedy="upgrade gemmcache",
            )
        environments, policies = fields.sub("environments"), fields.sub("policies")
        for digest, value in environments.extra().items():
            if Environment.from_fields(environments.sub(digest)).digest != digest:
                raise environments.fail(digest, "is not the digest of its environment")
            self.environments[digest] = value
        for digest, value in policies.extra().items():
            if policy_digest(MeasurementPolicy.from_fields(policies.sub(digest))) != digest:
                raise policies.fail(digest, "is not the digest of its policy")
            self.policies[digest] = value

    def _record(self, value: object, where: str) -> TuningRecord:
        fields = codec.Fields(value, where)
        found = fields.integer("format", low=1)
        if found > RECORD_FORMAT:
            raise IncompatibleError(
                f"{where}: record format {found}, this gemmcache reads {RECORD_FORMAT}",
                remedy="upgrade gemmcache",
            )
        whole = dict(fields.extra(), format=found)
        for name, shared in (("environment", self.environments), ("policy", self.policies)):
            digest = fields.raw(name)
            if isinstance(digest, str):
                if digest not in shared:
                    raise fields.fail(name, f"'{digest[:64]}' is not defined in a header line before")
                whole[name] = shared[digest]
        record = TuningRecord.from_value(whole, where)
        if measured_time(record) is None:
            raise fields.fail("measured_at", "is not a time in ISO 8601, as in 2026-12-01T12:00:00Z")
        return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one map")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"{text[:20]}... is not a 64-bit integer")
    return int(text)


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_int=_integer, parse_constant=_refuse)


def _parse(line: bytes, where: str) -> Any:
    """The JSON value of a line. Raises `IntegrityError`, also for what JSON has and records don't."""
    try:
        value = _DECODER.decode(line.decode("utf-8").strip())
        if b"\\u" in line:
            codec.encode(value, floats=True)  # an escape can spell half a character, which UTF-8 can't store
    except (ValueError, RecursionError, UsageError) as error:
        raise IntegrityError(f"{where}: not a line of records: {error}") from error
    return value
