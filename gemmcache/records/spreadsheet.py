"""Records as CSV, one row a trial, to be looked at in a spreadsheet; it is not read back."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from gemmcache.records.files import write_atomically
from gemmcache.records.interchange import export_order, rounded
from gemmcache.records.interface import Trial, TuningRecord

#: Columns of the record, repeated in each of its rows.
_RECORD = (
    *("record", "product", "arch", "sm_count", "m", "n", "k", "batch"),
    *("a_dtype", "b_dtype", "out_dtype", "acc_dtype", "a_layout", "b_layout", "out_layout", "epilogue"),
    *("driver", "cuda_runtime", "torch", "cublas", "dsl", "measured_at", "choice", "baseline", "library_us"),
)
#: Columns of the trial: `rank` counts from 1, times are microseconds.
_TRIAL = ("rank", "kernel_family", "config", "status", "us", "x_library", "error", "samples_us", "detail")


def write_csv(path: Path, records: Iterable[TuningRecord]) -> int:
    """Writes `records` to `path`, atomically; returns the file's bytes. Raises `StorageError`."""
    return write_atomically(path, dump_csv(records))


def dump_csv(records: Iterable[TuningRecord]) -> Iterator[bytes]:
    """The lines of a CSV file, column names first; a record without trials has one row with empty cells."""
    yield _line([*_RECORD, *_TRIAL])
    for record in map(rounded, export_order(records)):
        about = _record_cells(record)
        for rank, trial in enumerate(record.trials, start=1):
            yield _line([*about, *_trial_cells(rank, trial, record.library_us)])
        if not record.trials:
            yield _line([*about, *([None] * len(_TRIAL))])


def _record_cells(record: TuningRecord) -> list[object]:
    family, environment = record.problem.family, record.environment
    values: dict[str, object] = {
        **family.to_value(),
        **environment.to_value(),
        **environment.target.to_value(),
        "record": record.digest,
        "m": record.problem.m,
        "dsl": environment.toolchain.dsl,
        "measured_at": record.measured_at,
        "choice": record.choice,
        "baseline": record.baseline,
        "library_us": round(record.library_us, 3),
    }
    return [values[name] for name in _RECORD]


def _trial_cells(rank: int, trial: Trial, library_us: float) -> list[object]:
    timed = bool(trial.samples_us)
    return [
        rank,
        trial.config.kernel_family,
        str(trial.config),
        trial.status,
        round(trial.us, 3) if timed else None,
        round(library_us / trial.us, 4) if timed else None,
        trial.error,
        " ".join(f"{s:g}" for s in trial.samples_us),
        trial.detail,
    ]


def _line(cells: list[object]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer).writerow([_inert(c) if isinstance(c, str) else c for c in cells])
    return buffer.getvalue().encode("utf-8", "backslashreplace")


def _inert(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
