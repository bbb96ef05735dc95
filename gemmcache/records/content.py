"""What a slot's row holds, which record wins over which, and their order."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

from gemmcache import codec
from gemmcache.errors import IncompatibleError, IntegrityError, UsageError
from gemmcache.records.interface import TuningRecord
from gemmcache.records.rows import MAX_VALUE_BYTES

ROW_FORMAT = 1

#: The most records (of different environments and policies) in one slot.
MAX_RECORDS = 4096

NEW, REPLACED, KEPT = "new", "replaced", "kept"

_LONG_AGO = datetime(1, 1, 1, tzinfo=timezone.utc)


def measured_time(record: TuningRecord) -> datetime | None:
    """When `record` was measured, in UTC; None where its text is not ISO 8601."""
    text = record.measured_at
    try:
        time = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
        return time.replace(tzinfo=timezone.utc) if time.tzinfo is None else time.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def age_key(record: TuningRecord) -> datetime:
    """Sort key from oldest to newest; a record with an unreadable time is older than any other."""
    return measured_time(record) or _LONG_AGO


def newest_first(records: Iterable[TuningRecord]) -> tuple[TuningRecord, ...]:
    """`records` by time, newest first; those of one time by digest."""
    return tuple(sorted(sorted(records, key=lambda r: r.digest), key=age_key, reverse=True))


def encode_row(records: Iterable[TuningRecord]) -> bytes:
    """The canonical bytes of a slot's records. Raises `UsageError` where they can't be stored."""
    values = [r.to_value() for r in sorted(records, key=lambda r: r.digest)]
    return codec.encode({"format": ROW_FORMAT, "records": values}, floats=True)


def decode_row(slot: str, data: bytes) -> tuple[TuningRecord, ...]:
    """The records of a slot's row.

    Raises `IncompatibleError` for a newer format, `IntegrityError` for bytes that `encode_row` would not have
    written for this slot.
    """
    where = f"records row {slot[:12]}"
    value = codec.decode(data, floats=True, max_bytes=MAX_VALUE_BYTES, what=where)
    fields = codec.Fields(value, where)
    found = fields.integer("format")
    if found > ROW_FORMAT:
        raise IncompatibleError(
            f"{where} has format {found}, this gemmcache reads {ROW_FORMAT}", remedy="upgrade gemmcache"
        )
    try:
        records = tuple(TuningRecord.from_fields(f) for f in fields.subs("records", most=MAX_RECORDS))
    except UsageError as error:
        raise IntegrityError(f"{where}: {error.message}") from error
    fields.done()
    for record in records:
        if record.slot != slot:
            raise IntegrityError(f"{where} holds a record of another problem or target, {record.problem}")
    if len({r.digest for r in records}) != len(records):
        raise IntegrityError(f"{where} holds two records for one environment and policy")
    return records


def absorb(records: dict[str, TuningRecord], record: TuningRecord) -> str:
    """Puts `record` among a slot's `records` (by digest), in place, and says what became of it.

    `new`; `replaced` where one with the same digest was measured earlier; `kept` where that one is as new.
    """
    digest = record.digest
    old = records.get(digest)
    if old is not None and age_key(record) <= age_key(old):
        return KEPT
    records[digest] = record
    return NEW if old is None else REPLACED
