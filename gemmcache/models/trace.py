"""Problems from a trace folder: definitions of GEMMs, and the ms that serving has seen for them.

`definitions/**/*.json` each hold one definition: `name`, `op_type` ("gemm"; others are left out), `axes` (one
variable, M, and constants N and K), `inputs` A and B and `outputs` C with their `shape` in axes and `dtype`.
`workloads/**/*.jsonl` hold one call a line: `{"definition": name, "workload": {"axes": {"M": m}}}`.
Other fields are free text here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gemmcache.codec import Fields
from gemmcache.dtypes import accumulator_for, dtype_name
from gemmcache.errors import UsageError
from gemmcache.models.files import parse_json, read_bytes
from gemmcache.models.interface import Layer, Workload
from gemmcache.models.traffic import Traffic
from gemmcache.problem import A_LAYOUTS, B_LAYOUTS, MAX_DIM, OUT_LAYOUTS, ProblemFamily


def workload_of_trace(folder: Path, name: str, dtype: str | None = None) -> Workload:
    """The workload of a trace folder: a layer of count 1 for each GEMM definition, sorted by file name, and
    the share of each m among the calls seen. `dtype` overrides that of all tensors.

    Raises `UsageError`, naming file and line, for what is malformed, has no definition, or is no GEMM at all.
    """
    families: dict[str, ProblemFamily | None] = {}
    for path in sorted((folder / "definitions").rglob("*.json")):
        definition, family = _definition(path, dtype)
        if definition in families:
            raise UsageError(f"{path}: definition '{definition}' is in another file too", remedy="rename or remove one")
        families[definition] = family
    layers = tuple(Layer(definition, family) for definition, family in families.items() if family is not None)
    if not layers:
        raise UsageError(f"{folder}: definitions/ holds no definition of a GEMM", remedy="check the trace folder")
    seen: dict[str, Counter[int]] = {definition: Counter() for definition in families}
    for path in sorted((folder / "workloads").rglob("*.jsonl")):
        _count(path, families, seen)
    traffic = Traffic()
    for layer in layers:
        traffic.add(layer.family, seen[layer.path])
    return Workload(name, layers, traffic.shares())


def _definition(path: Path, dtype: str | None) -> tuple[str, ProblemFamily | None]:
    fields = Fields(parse_json(read_bytes(path), str(path)), str(path), kind=UsageError)
    name = fields.text("name")
    if fields.text("op_type") != "gemm":
        return name, None
    axes = fields.sub("axes")
    if axes.sub("M").choice("type", ("var", "const")) != "var":
        raise axes.fail("M", "must be a variable axis")
    sizes = {axis: axes.sub(axis).integer("value", low=1, high=MAX_DIM) for axis in ("N", "K")}
    axes.done()
    inputs, outputs = fields.sub("inputs"), fields.sub("outputs")
    a, b, c = inputs.sub("A"), inputs.sub("B"), outputs.sub("C")
    for tensors in (inputs, outputs):
        for extra in tensors.extra():
            raise tensors.fail(extra, "is a tensor of no plain GEMM, which has A, B and C only")
    a_dtype, b_dtype, out_dtype = (dtype_name(dtype) if dtype else _dtype(tensor) for tensor in (a, b, c))
    return name, ProblemFamily(
        n=sizes["N"],
        k=sizes["K"],
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        out_dtype=out_dtype,
        acc_dtype=accumulator_for(a_dtype),
        a_layout=_layout(a, A_LAYOUTS),
        b_layout=_layout(b, B_LAYOUTS),
        out_layout=_layout(c, OUT_LAYOUTS),
    )


def _dtype(tensor: Fields) -> str:
    try:
        return dtype_name(tensor.text("dtype"))
    except UsageError as error:
        raise UsageError(f"{tensor.where}: {error.message}", remedy=error.remedy) from error


def _layout(tensor: Fields, allowed: tuple[str, ...]) -> str:
    shape = tensor.items("shape")
    layout = "".join(axis.lower() for axis in shape if isinstance(axis, str))
    if len(shape) != 2 or layout not in allowed:
        raise tensor.fail("shape", f"is {shape}, not {' or '.join(str(list(text.upper())) for text in allowed)}")
    return layout


def _count(path: Path, families: dict[str, ProblemFamily | None], seen: dict[str, Counter[int]]) -> None:
    """Adds the calls of one file to `seen`."""
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        fields = Fields(parse_json(line, where), where, kind=UsageError)
        name = fields.text("definition")
        if name not in families:
            raise UsageError(f"{where}: no definition '{name}' in definitions/", remedy="add it, or remove the line")
        if families[name] is not None:
            seen[name][fields.sub("workload").sub("axes").integer("M", low=1, high=MAX_DIM)] += 1
