"""Tensor parallelism: which way each GEMM of a model splits, and one rank's share of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gemmcache.errors import UsageError
from gemmcache.models.gemms import Gemm
from gemmcache.models.interface import COLUMN, REPLICATED, ROW

#: Names of projections by what they make: queries, keys and values, or all three in one weight.
QUERY = frozenset({"q_proj", "query", "q", "q_lin", "wq"})
KEY = frozenset({"k_proj", "key", "k", "k_lin", "wk"})
VALUE = frozenset({"v_proj", "value", "v", "v_lin", "wv"})
QKV = frozenset({"qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv", "in_proj_weight"})
#: Gate and up projections in one weight: each half is split by itself.
GATE_UP = frozenset({"gate_up_proj"})

_COLUMN = (QUERY | KEY | VALUE | QKV | GATE_UP | frozenset({"q_b_proj", "kv_b_proj"})) | frozenset(
    {"gate_proj", "up_proj", "w1", "v1", "w3", "wi", "wi_0", "wi_1", "fc1", "c_fc", "fc_in"}
    | {"dense_h_to_4h", "lin1", "linear1"}
)
#: Row parallel where a sibling is column parallel: they take what that one left split.
_ROW = frozenset(
    {"o_proj", "out_proj", "down_proj", "fc2", "c_proj", "fc_out", "dense", "dense_4h_to_h"}
    | {"wo", "o", "w2", "out_lin", "lin2", "linear2", "proj"}
)
_PLAN = {
    "colwise": COLUMN,
    "colwise_gather_output": COLUMN,
    "colwise_rep": COLUMN,
    "local_colwise": COLUMN,
    "packed_colwise": COLUMN,
    "rowwise": ROW,
    "rowwise_split_input": ROW,
    "rowwise_rep": ROW,
    "local_rowwise": ROW,
    "mla_kv_a_proj": REPLICATED,
    "replicated_with_grad_allreduce": REPLICATED,
}


def starred(path: str) -> str:
    """`path` with every component that is a number replaced by `*`, as transformers' plans write it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def directions(gemms: Sequence[Gemm], plan: Mapping[str, str]) -> list[str]:
    """`column`, `row` or `replicated` for each of `gemms`.

    `plan` is transformers' tensor parallel plan (starred path -> style) and comes first. What it does not
    name goes by the names that attention and MLP projections have; a head is column parallel, the rest
    replicated.
    """
    found = [_PLAN.get(plan.get(starred(gemm.path), "")) or _by_name(gemm) for gemm in gemms]
    columns = {gemm.path for gemm, way in zip(gemms, found, strict=True) if way == COLUMN}
    parents = {path.rpartition(".")[0] for path in columns}
    return [way or _row_by_name(gemm, columns, parents) for gemm, way in zip(gemms, found, strict=True)]


def _by_name(gemm: Gemm) -> str | None:
    if gemm.is_head or gemm.leaf in _COLUMN or gemm.path.endswith("intermediate.dense"):
        return COLUMN
    return None


def _row_by_name(gemm: Gemm, columns: set[str], parents: set[str]) -> str:
    if gemm.path.endswith("output.dense"):
        # BERT's way: X.self.query with X.output.dense, X.intermediate.dense with X.output.dense.
        block = gemm.path.removesuffix("output.dense")
        split = f"{block}intermediate.dense" in columns or {f"{block}self", f"{block}attention"} & parents
        return ROW if split else REPLICATED
    return ROW if gemm.leaf in _ROW and gemm.parent in parents else REPLICATED


def split(gemm: Gemm, way: str, tp: int) -> Gemm:
    """One rank's share of `gemm` among `tp` ranks.

    Queries split by whole heads. Keys and values do too, and are replicated once there are more ranks than
    heads: a rank has `max(kv_heads // tp, 1)` of them. A row-parallel layer keeps its bias (added on one
    rank, or after the reduction). Raises `UsageError` where the sizes do not divide.
    """
    if tp == 1 or way == REPLICATED:
        return gemm
    if way == ROW:
        return replace(gemm, k=_share(gemm, "K", gemm.k, tp))
    leaf, dim = gemm.leaf, gemm.head_dim
    if leaf in QKV and dim and gemm.n % dim == 0:
        heads = gemm.n // dim
        kv = gemm.kv_heads if gemm.kv_heads and 2 * gemm.kv_heads < heads else heads // 3
        rank = _share(gemm, "query heads", heads - 2 * kv, tp) + 2 * _kv_share(gemm, kv, tp)
        return replace(gemm, n=rank * dim)
    if leaf in QKV:
        return replace(gemm, n=3 * _share(gemm, "a third of N", gemm.n // 3, tp))
    if leaf in VALUE and gemm.v_head_dim:
        dim = gemm.v_head_dim
    if leaf in KEY | VALUE and dim and gemm.n % dim == 0:
        return replace(gemm, n=_kv_share(gemm, gemm.n // dim, tp) * dim)
    if leaf in QUERY and dim and gemm.n % dim == 0:
        return replace(gemm, n=_share(gemm, "query heads", gemm.n // dim, tp) * dim)
    if leaf in GATE_UP:
        return replace(gemm, n=2 * _share(gemm, "half of N", gemm.n // 2, tp))
    return replace(gemm, n=_share(gemm, "N", gemm.n, tp))


def _share(gemm: Gemm, what: str, size: int, tp: int) -> int:
    if size % tp:
        raise UsageError(
            f"{gemm.path}: {what}, {size}, does not divide by {tp} ranks",
            remedy="use a number of ranks that divides it, or list one rank's problems in a file",
        )
    return size // tp


def _kv_share(gemm: Gemm, heads: int, tp: int) -> int:
    if heads % tp and tp % heads:
        raise UsageError(
            f"{gemm.path}: {heads} key/value heads neither divide by {tp} ranks nor into them",
            remedy="use a number of ranks that divides the heads, or a multiple of them",
        )
    return max(heads // tp, 1)
