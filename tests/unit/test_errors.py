"""Errors: exit codes, builtin bases, messages, and the way through a process boundary."""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

from gemmcache import errors

ALL = sorted(
    (value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.GemmcacheError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize(
    ("name", "builtin", "exit_code"),
    [
        ("GemmcacheError", Exception, 5),
        ("UsageError", ValueError, 2),
        ("UnsupportedError", ValueError, 2),
        ("IntegrityError", ValueError, 3),
        ("IncompatibleError", RuntimeError, 4),
        ("StaleError", RuntimeError, 4),
        ("MissError", LookupError, 1),
        ("MissingRecordError", LookupError, 1),
        ("MissingPackageError", ImportError, 5),
        ("ToolError", RuntimeError, 5),
        ("CompileError", RuntimeError, 5),
        ("DeviceError", RuntimeError, 5),
        ("MeasurementError", RuntimeError, 5),
        ("StorageError", OSError, 5),
    ],
)
def test_exit_codes_and_builtin_bases(name, builtin, exit_code):
    kind = getattr(errors, name)
    assert issubclass(kind, builtin)
    assert kind("x").exit_code == exit_code


def test_the_table_above_is_complete():
    assert len(ALL) == 14


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
def test_message_and_remedy(kind):
    plain, full = kind("it broke"), kind("it broke", remedy="mend it")
    assert (plain.message, plain.remedy, str(plain)) == ("it broke", "", "it broke")
    assert (full.message, full.remedy, str(full)) == ("it broke", "mend it", "it broke (mend it)")
    with pytest.raises(TypeError):
        kind("it broke", "mend it")


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_class_message_and_remedy(kind, protocol):
    error = kind("it broke", remedy="mend it")
    again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own bytes
    assert type(again) is kind
    assert (again.message, again.remedy, str(again)) == (error.message, error.remedy, str(error))
    assert again.exit_code == error.exit_code


def fail(name: str) -> None:
    raise getattr(errors, name)("it broke", remedy="mend it")


def test_errors_of_a_worker_process_arrive_whole():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name in ("StorageError", "CompileError", "MissingPackageError"):
            with pytest.raises(getattr(errors, name)) as caught:
                pool.submit(fail, name).result()
            assert str(caught.value) == "it broke (mend it)"


def write_to_nowhere() -> None:
    try:
        raise PermissionError(13, "Permission denied", "/x")
    except OSError as error:
        raise errors.StorageError(f"can't write: {error}") from error


def test_a_storage_error_shows_its_own_message_and_keeps_its_cause():
    with pytest.raises(OSError, match=r"^can't write: ") as caught:
        write_to_nowhere()
    assert str(caught.value) == "can't write: [Errno 13] Permission denied: '/x'"
    assert isinstance(caught.value.__cause__, PermissionError)
