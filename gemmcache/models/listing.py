"""Problems from a plain list in JSON or YAML, for what no model config or trace describes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemmcache.codec import Fields
from gemmcache.dtypes import dtype_name
from gemmcache.errors import UsageError
from gemmcache.ladder import parse_ms
from gemmcache.models.interface import Layer, Workload
from gemmcache.models.traffic import Traffic
from gemmcache.problem import MAX_DIM, ProblemFamily

_MAX_ITEMS = 100_000


def workload_of_list(value: Any, name: str, where: str, dtype: str | None = None) -> Workload:
    """The workload of `[{n, k, name?, dtype?, out?, epilogue?, a_layout?, b_layout?, count?, ms?}]` or
    `{name?, problems: [...]}`.

    `n` and `k` are the weight's rows and columns; `dtype` (bfloat16 unless given), `out` (the same) and
    `epilogue` (none) are as `ProblemFamily.of` reads them, the layouts (mk, nk) as `ProblemFamily` does; `count`
    is per forward pass (1); `ms` (or `m`) is a list, one number, or text like `1..8192`, every m with the same
    share. `dtype` given here overrides the items'. Raises `UsageError` that names the item and the field for
    anything missing, malformed or unknown.
    """
    if isinstance(value, dict):
        fields = Fields(value, where, kind=UsageError)
        name = fields.text("name", name)
        items = fields.items("problems", most=_MAX_ITEMS)
        fields.done()
    elif isinstance(value, list):
        items = value
    else:
        raise UsageError(f"{where}: expected a list of problems, found {type(value).__name__}")
    if not items:
        raise UsageError(f"{where}: the list of problems is empty", remedy='for example [{"n": 4096, "k": 4096}]')
    if len(items) > _MAX_ITEMS:
        raise UsageError(f"{where}: {len(items)} problems are more than the {_MAX_ITEMS} allowed")
    layers, traffic = [], Traffic()
    for i, item in enumerate(items):
        fields = Fields(item, f"{where}: problems[{i}]", kind=UsageError)
        layer, ms = _layer(fields, f"problems[{i}]", dtype)
        fields.done()
        layers.append(layer)
        traffic.add(layer.family, dict.fromkeys(ms, layer.count / len(ms)) if ms else {})
    return Workload(name, tuple(layers), traffic.shares())


def _layer(fields: Fields, path: str, dtype: str | None) -> tuple[Layer, tuple[int, ...]]:
    n = fields.integer("n", low=1, high=MAX_DIM)
    k = fields.integer("k", low=1, high=MAX_DIM)
    own, out = fields.text("dtype", "bfloat16"), fields.opt_text("out")
    epilogue, count = fields.text("epilogue", "none"), fields.integer("count", 1, low=1, high=MAX_DIM)
    a_layout, b_layout = fields.text("a_layout", "mk"), fields.text("b_layout", "nk")
    try:
        dtype_name(own)
        family = ProblemFamily.of(n, k, dtype or own, epilogue, out)
        family = replace(family, a_layout=a_layout, b_layout=b_layout)
    except UsageError as error:
        raise UsageError(f"{fields.where}: {error.message}", remedy=error.remedy) from error
    return Layer(fields.text("name", path), family, count), _ms(fields)


def _ms(fields: Fields) -> tuple[int, ...]:
    given = {name: fields.raw(name, None) for name in ("ms", "m")}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return ()
    if len(names) > 1:
        raise fields.fail("m", "is another name of 'ms': give one of them")
    name, value = names[0], given[names[0]]
    if isinstance(value, str):
        try:
            ms = parse_ms(value)
        except UsageError as error:
            raise UsageError(f"{fields.where}: field '{name}': {error.message}", remedy=error.remedy) from error
    else:
        found = value if isinstance(value, list) else [value]
        if not found or any(type(m) is not int for m in found):
            raise fields.fail(name, "must be a number, a list of numbers, or text like '1..8192'")
        ms = tuple(sorted(set(found)))
    if ms[0] < 1 or ms[-1] > MAX_DIM:
        raise fields.fail(name, f"holds an m outside 1..{MAX_DIM}")
    return ms
