"""`gemmcache shapes`: the GEMMs of a source, before anything is tuned."""

from __future__ import annotations

import click

from gemmcache.cli.output import json_option, print_json, print_table
from gemmcache.cli.source import source_options, workload_of
from gemmcache.models.interface import Layer, Workload


@click.command("shapes")
@source_options
@json_option
def command(
    source: str,
    fuse: bool,
    tp: int,
    dtype: str | None,
    epilogues: str,
    ms: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    """List the GEMMs of SOURCE: a Hugging Face config.json or its folder, a trace folder, a JSON or YAML list
    of problems, or the name of a shipped example such as llama-3.1-8b.

    COUNT is per forward pass. N and K are the rows and columns of the weight, as torch.nn.Linear stores it.
    PARALLEL is how tensor parallelism splits the weight: by rows (column parallel), by columns (row
    parallel), or not at all. MS is how many values of m would be tuned.

    FUSABLE is the epilogue that could be computed in the GEMM, bias included: what the model's own forward pass,
    run on a tiny input without weights, does to its output before anything else reads it. --epilogues takes it
    into the families. A gate, swiglu or geglu, needs gate and up in one weight (--fuse). Row-parallel layers
    have none with --tp: they are summed over the ranks first. Sources that are no models have - there.

    \b
    --json prints one object; these fields are stable:
      name      text, the model's or the list's
      fused     true or false, as --fuse
      tp        number of ranks
      epilogues none, model or both, as --epilogues
      families  number of distinct families of problems
      problems  number of problems to tune: families times their ms
      layers    list of {path, count, n, k, a_dtype, b_dtype, out_dtype,
                epilogue, proposed_epilogue (as FUSABLE; null where the
                source is no model), parallel, family (digest), ms (list of m),
                shares (list, one for each m, or null where traffic is unknown)}
    """
    workload = workload_of(source, fuse, tp, dtype, epilogues, notes=True)
    problems = workload.problems(ms)
    if as_json:
        print_json(
            {
                "name": workload.name,
                "fused": fuse,
                "tp": tp,
                "epilogues": epilogues,
                "families": len(workload.families()),
                "problems": len(problems),
                "layers": [_layer(workload, layer, ms) for layer in workload.layers],
            }
        )
        return
    ranks = f", one of {tp} ranks" if tp > 1 else ""
    print_table(
        f"{workload.name}{ranks}: {len(workload.families())} families, {len(problems)} problems",
        ("path", "count", "N", "K", "dtype", "epilogue", "fusable", "parallel", "ms"),
        [
            (
                layer.path,
                layer.count,
                layer.family.n,
                layer.family.k,
                _dtype(layer),
                layer.family.epilogue,
                "-" if layer.proposed is None else layer.proposed,
                layer.parallel,
                len(workload.ms(layer.family, ms)),
            )
            for layer in workload.layers
        ],
        right=(1, 2, 3, 8),
    )


def _layer(workload: Workload, layer: Layer, override: tuple[int, ...] | None) -> dict[str, object]:
    family = layer.family
    ms = workload.ms(family, override)
    return {
        "path": layer.path,
        "count": layer.count,
        "n": family.n,
        "k": family.k,
        "a_dtype": family.a_dtype,
        "b_dtype": family.b_dtype,
        "out_dtype": family.out_dtype,
        "epilogue": str(family.epilogue),
        "proposed_epilogue": None if layer.proposed is None else str(layer.proposed),
        "parallel": layer.parallel,
        "family": family.digest,
        "ms": list(ms),
        "shares": workload.shares(family, override),
    }


def _dtype(layer: Layer) -> str:
    family = layer.family
    operands = family.a_dtype if family.a_dtype == family.b_dtype else f"{family.a_dtype}x{family.b_dtype}"
    return operands if family.out_dtype == family.a_dtype else f"{operands}->{family.out_dtype}"
