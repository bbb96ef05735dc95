"""One way in for every source of problems: model config, trace folder, list, or a shipped model's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemmcache.dtypes import dtype_name
from gemmcache.errors import UsageError
from gemmcache.models.files import parse_json, parse_yaml, read_bytes
from gemmcache.models.huggingface import workload_of_config
from gemmcache.models.interface import PLAIN, Workload
from gemmcache.models.listing import workload_of_list
from gemmcache.models.shipped import shipped_models
from gemmcache.models.trace import workload_of_trace

_KINDS = (
    "give a Hugging Face config.json or its folder, a trace folder (definitions/ and workloads/), "
    "or a JSON or YAML list of problems"
)


def load_workload(
    source: str | Path,
    *,
    dtype: str | None = None,
    fuse: bool = False,
    tp: int = 1,
    epilogues: str = PLAIN,
    cache_dir: Path | None = None,
) -> Workload:
    """The workload that `source` describes.

    `source` is a Hugging Face config.json or a folder with one, a trace folder (`trace.workload_of_trace`), a
    JSON or YAML list (`listing.workload_of_list`), or the short name of a shipped example such as
    `llama-3.1-8b`; a path that exists comes before a name. `dtype` overrides the operands' dtype (name or
    alias). `fuse` and `tp` (ranks of tensor parallelism, families being one rank's) are for model configs
    only. `epilogues` says whether a model's layers have their bias only ("none"), the epilogues that its
    forward pass proposes ("model"), or both, each in a family of its own; lists and traces keep theirs.
    Building a model takes seconds; its workload is kept under `cache_dir` (by default the user's).
    Raises `UsageError` that names the file and field for anything that is missing, malformed or unknown, and
    `MissingPackageError` where a package is needed to read the source.
    """
    return _load(source, dtype, fuse, tp, cache_dir).with_epilogues(epilogues)


def _load(source: str | Path, dtype: str | None, fuse: bool, tp: int, cache_dir: Path | None) -> Workload:
    dtype = dtype_name(dtype) if dtype else None
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UsageError(f"tp is {tp!r}, not a number of ranks", remedy="1 for no tensor parallelism")
    path = Path(source)
    if not path.exists():
        path = _shipped(str(source))
    if path.is_dir():
        if (path / "config.json").exists():
            path = path / "config.json"
        elif (path / "definitions").is_dir():
            _no_model(str(path), "a trace", fuse, tp)
            return workload_of_trace(path, path.resolve().name, dtype)
        else:
            raise UsageError(f"{path}: neither config.json nor definitions/ is in this folder", remedy=_KINDS)
    data = read_bytes(path)
    value = _parse(path, data)
    if isinstance(value, list) or (isinstance(value, dict) and "problems" in value):
        _no_model(str(path), "a list of problems", fuse, tp)
        return workload_of_list(value, path.resolve().stem, str(path), dtype)
    if not isinstance(value, dict) or path.suffix.lower() in (".yaml", ".yml"):
        raise UsageError(f"{path}: neither a model config nor a list of problems", remedy=_KINDS)
    resolved = path.absolute()
    name = resolved.parent.name if path.name == "config.json" else resolved.stem
    return workload_of_config(data, name or "model", str(path), dtype=dtype, fuse=fuse, tp=tp, cache_dir=cache_dir)


def _shipped(source: str) -> Path:
    models = shipped_models()
    if source in models:
        return models[source]
    names = f", or one of {', '.join(models)}" if models else ""
    raise UsageError(f"{source}: no such file or folder", remedy=_KINDS + names)


def _parse(path: Path, data: bytes) -> Any:
    if path.suffix.lower() in (".yaml", ".yml"):
        return parse_yaml(data, str(path))
    return parse_json(data, str(path))


def _no_model(where: str, what: str, fuse: bool, tp: int) -> None:
    if fuse or tp != 1:
        option = "fuse" if fuse else "tp"
        raise UsageError(
            f"{where}: '{option}' is for model configs, and this is {what}",
            remedy="leave it out: the problems are taken as they are written",
        )
