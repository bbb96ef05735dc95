"""Reading the files that people write: bounded, strict, and with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from gemmcache.errors import MissingPackageError, UsageError

#: A source of problems larger than this is something else.
MAX_FILE_BYTES = 64 << 20


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file of at most `MAX_FILE_BYTES`. Raises `UsageError` otherwise."""
    if not path.exists():
        raise UsageError(f"{path}: no such file", remedy="check the path")
    if not path.is_file():
        raise UsageError(f"{path}: not a regular file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror}", remedy="check its permissions") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path}: larger than the {MAX_FILE_BYTES >> 20} MiB allowed for a source of problems")
    return data


def parse_json(data: bytes, where: str) -> Any:
    """The JSON value in `data`; repeated keys and NaN are refused. Raises `UsageError` naming `where`."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON: {error}", remedy="correct the file") from error


def parse_yaml(data: bytes, where: str) -> Any:
    """The YAML value in `data`, plain types only; repeated keys are refused.

    Raises `UsageError` naming `where`, `MissingPackageError` without PyYAML.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingPackageError(f"{where}: YAML needs PyYAML", remedy="pip install 'gemmcache[cli]'") from error

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ValueError(f"key '{key}' is repeated")
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(data, Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{where}: not valid YAML: {reason}", remedy="correct the file") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key '{next(n for n in names if names.count(n) > 1)}' is repeated")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
