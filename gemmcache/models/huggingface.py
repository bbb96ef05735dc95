"""Problems from a Hugging Face config.json: built on the meta device, split, fused, counted, cached."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from gemmcache import dtypes
from gemmcache.epilogue import Epilogue
from gemmcache.errors import MissingPackageError, UsageError
from gemmcache.models.cache import WorkloadCache, key_of
from gemmcache.models.files import parse_json
from gemmcache.models.fusion import fuse as fuse_siblings
from gemmcache.models.gemms import Gemm, gemms_of
from gemmcache.models.interface import Layer, Workload
from gemmcache.models.parallel import directions, split, starred
from gemmcache.models.proposal import proposed
from gemmcache.problem import ProblemFamily


def workload_of_config(
    data: bytes,
    name: str,
    where: str,
    *,
    dtype: str | None = None,
    fuse: bool = False,
    tp: int = 1,
    cache_dir: Path | None = None,
) -> Workload:
    """The GEMMs of the model that the config.json `data` describes, those of one of `tp` ranks.

    Every linear layer is listed with its bias as epilogue, the language model's head too, routers and experts
    as `gemms.gemms_of` says. Each has the epilogue that the model's own forward pass proposes (`watch.watch`,
    `proposal.proposed`) beside it; notes say where that could not be watched.
    `dtype` is that of the GEMMs' operands: as given, else the config's, else bfloat16; with 8-bit operands
    out has the config's dtype. `tp` splits as `parallel.directions` says, before `fuse` merges siblings as
    `fusion.fuse` says. Raises `UsageError` naming `where`, `MissingPackageError` without transformers.
    """
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        raise MissingPackageError(
            "reading a model config needs transformers", remedy="pip install 'gemmcache[hf]'"
        ) from error
    cache = WorkloadCache(cache_dir)
    key = key_of(data, {"name": name, "dtype": dtype, "fuse": fuse, "tp": tp}, version)
    cached = cache.get(key)
    if cached is not None:
        return cached
    config = parse_json(data, where)
    if not isinstance(config, dict):
        raise UsageError(f"{where}: expected a map, found {type(config).__name__}")
    operands, out = _dtypes(config, dtype, where)

    # Imported here: a hit needs neither torch nor transformers.
    from gemmcache.models.build import build_model, quiet_and_offline
    from gemmcache.models.watch import watch

    model = build_model(config, where)
    gemms = gemms_of(model)
    if not gemms:
        raise UsageError(f"{where}: this model has no linear layers", remedy="list its problems in a JSON file")
    with quiet_and_offline():
        after, notes = watch(model, gemms)
    gemms = [replace(gemm, after=after.get(gemm.path, gemm.after)) for gemm in gemms]
    try:
        ways = directions(gemms, getattr(model, "_tp_plan", None) or {})
        ranked = [(split(gemm, way, tp), way) for gemm, way in zip(gemms, ways, strict=True)]
        layers = _layers(fuse_siblings(ranked) if fuse else ranked, operands, out, tp)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", remedy=error.remedy) from error
    workload = Workload(name, layers, notes=notes)
    cache.put(key, workload)
    return workload


def _dtypes(config: dict[str, Any], given: str | None, where: str) -> tuple[str, str]:
    """(operands, out) dtypes: see `workload_of_config`."""
    parts = [config, *(config[p] for p in ("text_config", "llm_config") if isinstance(config.get(p), dict))]
    found = [part[f] for part in parts for f in ("dtype", "torch_dtype") if part.get(f) is not None]
    try:
        if found and not isinstance(found[0], str):
            raise UsageError(f"is {found[0]!r}, not text", remedy="for example bfloat16")
        own = dtypes.dtype_name(found[0]) if found else "bfloat16"
    except UsageError as error:
        raise UsageError(f"{where}: field 'dtype': {error.message}", remedy=error.remedy) from error
    if config.get("quantization_config") is not None and given is None:
        raise UsageError(
            f"{where}: the model is quantized ('quantization_config'), which its GEMMs may or may not be",
            remedy="say what they run in with dtype, for example bfloat16 or float8_e4m3fn",
        )
    operands = dtypes.dtype_name(given) if given else own
    if dtypes.SIZES[operands] > 1:
        return operands, operands
    return operands, own if dtypes.SIZES[own] > 1 else "bfloat16"


def _layers(gemms: list[tuple[Gemm, str]], operands: str, out: str, tp: int) -> tuple[Layer, ...]:
    """GEMMs that differ in nothing but numbers in their paths, as one layer with their count."""
    groups: dict[tuple[str, ProblemFamily, str, Epilogue], list[Gemm]] = {}
    for gemm, way in gemms:
        family = ProblemFamily.of(gemm.n, gemm.k, operands, "bias" if gemm.bias else "none", out)
        groups.setdefault((starred(gemm.path), family, way, proposed(gemm, way, tp)), []).append(gemm)
    return tuple(
        Layer(_common([g.path for g in members]), family, sum(g.count for g in members), way, epilogue)
        for (_, family, way, epilogue), members in groups.items()
    )


def _common(paths: list[str]) -> str:
    """The paths as one, with `*` for the components in which they differ."""
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)
