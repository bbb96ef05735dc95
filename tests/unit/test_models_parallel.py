"""Directions, splits and fusion on GEMMs written by hand: no model is built here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.errors import UsageError
from gemmcache.models.after import After
from gemmcache.models.fusion import fuse
from gemmcache.models.gemms import Gemm
from gemmcache.models.interface import COLUMN, REPLICATED, ROW
from gemmcache.models.parallel import directions, split, starred


def _attention(heads: int, kv: int, dim: int, hidden: int, bias: bool = False) -> list[Gemm]:
    return [
        Gemm("l.0.attn.q_proj", heads * dim, hidden, bias, head_dim=dim),
        Gemm("l.0.attn.k_proj", kv * dim, hidden, bias, head_dim=dim),
        Gemm("l.0.attn.v_proj", kv * dim, hidden, bias, head_dim=dim),
        Gemm("l.0.attn.o_proj", hidden, heads * dim, head_dim=dim),
    ]


def test_starred() -> None:
    assert starred("model.layers.10.mlp.fc1") == "model.layers.*.mlp.fc1"
    assert starred("h.0.1.w") == "h.*.*.w"
    assert starred("a.layer4.b") == "a.layer4.b"


def test_plan_comes_before_names() -> None:
    gemms = [Gemm("l.3.mlp.up_proj", 8, 8), Gemm("l.3.mlp.down_proj", 8, 8), Gemm("l.3.other", 8, 8)]
    assert directions(gemms, {}) == [COLUMN, ROW, REPLICATED]
    plan = {"l.*.mlp.up_proj": "mla_kv_a_proj", "l.*.other": "rowwise"}
    # The name of the second one makes it row parallel only beside a column-parallel sibling.
    assert directions(gemms, plan) == [REPLICATED, REPLICATED, ROW]


def test_an_unknown_style_goes_by_name() -> None:
    gemm = Gemm("l.0.mlp.experts.gate_up_proj", 8, 8)
    assert directions([gemm], {"l.*.mlp.experts.gate_up_proj": "grouped_gemm"}) == [COLUMN]


def test_a_classifier_named_like_an_output_is_not_split() -> None:
    gemms = [Gemm("pooler.output.dense", 8, 8), Gemm("head.out_proj", 2, 8), Gemm("head.dense", 8, 8)]
    assert directions(gemms, {}) == [REPLICATED] * 3


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_key_value_heads_are_replicated_beyond_their_number(kv: int, tp: int) -> None:
    q, k, v, o = (split(g, w, tp) for g, w in zip(_attention(32, kv, 16, 64), [COLUMN] * 3 + [ROW], strict=True))
    assert (q.n, q.k) == (32 // tp * 16, 64)
    assert k.n == v.n == max(kv // tp, 1) * 16
    assert (o.n, o.k) == (64, 32 // tp * 16)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_fused_weight_splits_like_its_parts(kv: int, tp: int) -> None:
    parts = _attention(32, kv, 16, 64)[:3]
    whole = Gemm("l.0.attn.qkv_proj", sum(g.n for g in parts), 64, head_dim=16, kv_heads=kv)
    assert split(whole, COLUMN, tp).n == sum(split(g, COLUMN, tp).n for g in parts)


def test_values_may_have_heads_of_another_size() -> None:
    v = Gemm("l.0.attn.v_proj", 4 * 24, 64, head_dim=16, v_head_dim=24)
    assert split(v, COLUMN, 8).n == 24


def test_gate_up_halves_split_by_themselves() -> None:
    assert split(Gemm("m.gate_up_proj", 24, 8), COLUMN, 4).n == 6
    with pytest.raises(UsageError, match="half of N, 10"):
        split(Gemm("m.gate_up_proj", 20, 8), COLUMN, 4)


@pytest.mark.parametrize(
    ("gemm", "way", "tp", "message"),
    [
        (Gemm("a.q_proj", 28 * 16, 64, head_dim=16), COLUMN, 8, "query heads, 28"),
        (Gemm("a.k_proj", 6 * 16, 64, head_dim=16), COLUMN, 4, "6 key/value heads"),
        (Gemm("a.fc1", 10, 64), COLUMN, 4, "N, 10"),
        (Gemm("a.fc2", 64, 10), ROW, 4, "K, 10"),
        (Gemm("lm_head", 50257, 64, is_head=True), COLUMN, 2, "N, 50257"),
    ],
)
def test_sizes_that_do_not_divide(gemm: Gemm, way: str, tp: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        split(gemm, way, tp)
    assert gemm.path in caught.value.message
    assert caught.value.remedy


def test_row_parallel_keeps_its_bias_and_replicated_its_size() -> None:
    assert split(Gemm("a.fc2", 64, 16, True), ROW, 4) == Gemm("a.fc2", 64, 4, True)
    assert split(Gemm("a.gate", 7, 16), REPLICATED, 4) == Gemm("a.gate", 7, 16)


def _fused(gemms: list[Gemm]) -> list[tuple[str, int]]:
    return [(g.path, g.n) for g, _ in fuse([(g, COLUMN) for g in gemms])]


def test_fuse_merges_in_the_first_place() -> None:
    gemms = [
        Gemm("n", 1, 1),
        *_attention(4, 2, 16, 64, bias=True),
        Gemm("m.up_proj", 8, 4),
        Gemm("m.gate_proj", 8, 4),
    ]
    assert _fused(gemms) == [
        ("n", 1),
        ("l.0.attn.qkv_proj", 128),
        ("l.0.attn.o_proj", 64),
        ("m.gate_up_proj", 16),
    ]


@pytest.mark.parametrize(
    "odd",
    [
        Gemm("a.k_proj", 8, 4, bias=True),
        Gemm("a.k_proj", 8, 5),
        Gemm("a.k_proj", 8, 4, count=2),
        Gemm("b.k_proj", 8, 4),
    ],
)
def test_fuse_leaves_unlike_siblings(odd: Gemm) -> None:
    gemms = [Gemm("a.q_proj", 8, 4), odd, Gemm("a.v_proj", 8, 4)]
    assert _fused(gemms) == [(g.path, g.n) for g in gemms]


def test_fuse_leaves_siblings_of_other_inputs() -> None:
    def reading(*reads: tuple[int, ...]) -> list[Gemm]:
        names = ("q_proj", "k_proj", "v_proj")
        return [Gemm(f"a.{name}", 8, 4, after=After(reads=r)) for name, r in zip(names, reads, strict=True)]

    # Position embeddings are added to queries and keys only.
    assert _fused(detr := reading((1,), (1,), (2,))) == [(g.path, g.n) for g in detr]
    assert _fused(reading((1, 7), (1, 7), (1, 7))) == [("a.qkv_proj", 24)]
    assert len(_fused(reading((1, 7), (1, 7), (1, 8)))) == 3


def test_fuse_leaves_cross_attention_and_other_directions() -> None:
    names = ("q_proj", "k_proj", "v_proj")
    cross = [Gemm(f"a.{name}", 8, 4, cross=True) for name in names]
    assert _fused(cross) == [(g.path, 8) for g in cross]
    mixed = [(Gemm(f"a.{name}", 8, 4), REPLICATED if name == "k_proj" else COLUMN) for name in names]
    assert fuse(mixed) == mixed


GATE, UP = After("silu", times="m.up_proj"), After()


@pytest.mark.parametrize(
    ("gate", "up", "after"),
    [
        (GATE, UP, After(gate="silu")),
        # The gate is the other half, another layer's, or not the only reader.
        (UP, After("silu", times="m.gate_proj"), After()),
        (After("silu", times="n.up_proj"), UP, After()),
        (GATE, After("silu"), After()),
        (After("silu"), UP, After()),
        (After("silu"), After("silu"), After("silu")),
        (After(), After(), After()),
    ],
)
def test_what_comes_after_a_merged_weight(gate: After, up: After, after: After) -> None:
    members = [Gemm("m.gate_proj", 8, 4, after=gate), Gemm("m.up_proj", 8, 4, after=up)]
    ((merged, _),) = fuse([(gemm, COLUMN) for gemm in members])
    assert (merged.path, merged.after) == ("m.gate_up_proj", after)


@pytest.mark.parametrize(
    ("path", "expert"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.mlp.experts.3.w1", True),
        ("experts.w1", True),
        ("model.layers.0.mlp.shared_experts.gate_proj", False),
        ("model.layers.0.mlp.shared_expert.gate_proj", False),
        ("model.layers.0.mlp.gate", False),
    ],
)
def test_experts_by_their_path(path: str, expert: bool) -> None:
    assert Gemm(path, 8, 8).is_expert is expert
