"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gemmcache.errors import UsageError
from gemmcache.target import Target, detect_target, named_target

F = TypeVar("F", bound=Callable[..., Any])

_HELP = "Records folder [default: $GEMMCACHE_RECORDS_DIR, else the user's data folder]."


def records_option(function: F) -> F:
    """`--records DIR`: another folder than the user's own; made where a command writes to it."""
    return _records(function, None)


def existing_records_option(function: F) -> F:
    """`--records DIR` for commands that only read: a folder without records is a mistake, not an empty answer."""
    return _records(function, _must_hold_records)


def _records(function: F, callback: Callable[..., Path | None] | None) -> F:
    return click.option(
        "--records",
        "folder",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        callback=callback,
        help=_HELP,
    )(function)


def _must_hold_records(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    from gemmcache.records.store import is_store

    if value is not None and not is_store(value):
        raise UsageError(f"--records: {value} holds no records", remedy="name a folder that tune or import wrote")
    return value


def target_of(name: str) -> Target:
    """The target of `--target`: a product's short name, or `native` for the GPU of this machine."""
    return detect_target() if name == "native" else named_target(name)
