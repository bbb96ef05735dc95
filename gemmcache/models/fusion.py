"""Sibling projections of one input merged into one GEMM, as serving engines do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gemmcache.models.after import After
from gemmcache.models.gemms import Gemm

#: Siblings under one parent -> the name of what they become.
GROUPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (("query", "key", "value"), "qkv_proj"),
    (("q_lin", "k_lin", "v_lin"), "qkv_proj"),
    (("wq", "wk", "wv"), "qkv_proj"),
    (("q", "k", "v"), "qkv_proj"),
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("w1", "w3"), "gate_up_proj"),
    (("wi_0", "wi_1"), "gate_up_proj"),
)
#: The names that a gate and its up projection have.
GATES = tuple(names for names, new in GROUPS if new == "gate_up_proj")


def fuse(gemms: Sequence[tuple[Gemm, str]]) -> list[tuple[Gemm, str]]:
    """`gemms` (each with its direction) with q/k/v and gate/up siblings merged, N summed.

    Merged are only whole groups with the same K, bias, count, direction and input, outside cross-attention
    (whose queries and keys have different inputs), in the order of `GROUPS`: [gate; up], as gated epilogues
    read it. Where the forward pass was not watched, names can't tell that a model adds position embeddings to
    queries and keys but not to values (the DETR family): don't fuse those.
    """
    by_path = {gemm.path: (gemm, way) for gemm, way in gemms}
    merged: dict[str, tuple[Gemm, str] | None] = {}
    for names, new in GROUPS:
        for gemm, way in gemms:
            if gemm.leaf != names[0] or gemm.cross:
                continue
            prefix = gemm.path.removesuffix(gemm.leaf)
            group = [by_path.get(prefix + name) for name in names]
            members = [member for member in group if member is not None]
            alike = {(g.k, g.bias, g.count, w, g.after.reads) for g, w in members}
            if len(members) != len(names) or len(alike) != 1 or prefix + new in by_path:
                continue
            n, after = sum(g.n for g, _ in members), _after([g for g, _ in members])
            merged[gemm.path] = (replace(gemm, path=prefix + new, n=n, after=after), way)
            merged.update({g.path: None for g, _ in members[1:]})
    result = (merged.get(gemm.path, (gemm, way)) for gemm, way in gemms)
    return [entry for entry in result if entry is not None]


def _after(members: Sequence[Gemm]) -> After:
    """What comes after the merged weight: the gate, or the steps that all members have."""
    first, second = members[0].after, members[1].after
    if len(members) == 2 and first.times == members[1].path:
        return After(gate=first.activation) if second == After() else After()
    return first if first.times is None and all(g.after == first for g in members) else After()
