"""The epilogues that models propose: from their forward pass, by names where that fails, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from gemmcache.epilogue import Epilogue
from gemmcache.errors import UsageError
from gemmcache.models import watch
from gemmcache.models.after import After
from gemmcache.models.gemms import Gemm
from gemmcache.models.interface import COLUMN, REPLICATED, ROW, Layer, Workload
from gemmcache.models.proposal import proposed
from gemmcache.models.source import load_workload
from gemmcache.models.structure import after_by_names
from gemmcache.problem import ProblemFamily

Load = Callable[..., Workload]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}


def _decoder(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {**SIZES, "num_key_value_heads": 2, "model_type": kind, "architectures": [f"{name}ForCausalLM"], **more}


LLAMA = _decoder("llama", "Llama")
BERT = {**SIZES, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4}
GPT2 |= {"vocab_size": 128}
OPT = _decoder("opt", "OPT", ffn_dim=96, word_embed_proj_dim=64)
VIT = {**SIZES, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 16}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 96, "d_kv": 16}
T5 |= {"num_heads": 4, "num_layers": 2, "vocab_size": 128}
GEMMA2 = _decoder("gemma2", "Gemma2", head_dim=16)
#: A norm before each projection, and its output added as it is.
GATED = {"q": "none", "k": "none", "v": "none", "o": "residual", "gate": "silu", "up": "none", "down": "residual"}
GATED |= {"lm_head": "none"}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(config: dict[str, Any] | str, **options: Any) -> Workload:
        path = tmp_path / "model" / "config.json"
        if isinstance(config, dict):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(config))
        return load_workload(path if isinstance(config, dict) else config, cache_dir=tmp_path / "cache", **options)

    return load


def proposals(workload: Workload) -> dict[str, str]:
    """Last component of a path, without `_proj` -> what is proposed; all layers of that name agree."""
    found: dict[str, str] = {}
    for layer in workload.layers:
        name = layer.path.rpartition(".")[2].removesuffix("_proj")
        name = ".".join(layer.path.split(".")[-2:]) if name in ("dense", "c") else name
        assert found.setdefault(name, str(layer.proposed)) == str(layer.proposed), layer.path
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, GATED),
        (_decoder("mistral", "Mistral"), GATED),
        (_decoder("qwen2", "Qwen2"), {**GATED, **dict.fromkeys("qkv", "bias")}),
        (_decoder("qwen3", "Qwen3", head_dim=16), GATED),
        ({**LLAMA, "attention_bias": True}, {**GATED, **dict.fromkeys("qkv", "bias"), "o": "bias+residual"}),
        # Norms after the projections: nothing is left for the residual to be added to.
        (GEMMA2, {**GATED, "o": "none", "down": "none", "gate": "gelu_tanh"}),
        # Factors between projections and residuals, and the same at 1.
        (_decoder("granite", "Granite", residual_multiplier=0.22), {**GATED, "o": "none", "down": "none"}),
        (_decoder("granite", "Granite", residual_multiplier=1.0), GATED),
        # Attention and MLP side by side.
        (_decoder("cohere", "Cohere", pad_token_id=0, tie_word_embeddings=True), GATED),
        (
            _decoder("phi", "Phi", num_key_value_heads=4),
            {**dict.fromkeys("qkv", "bias"), "self_attn.dense": "bias", "fc1": "bias+gelu_tanh"}
            | {"fc2": "bias+residual", "lm_head": "bias"},
        ),
        # The square of relu: relu is fused, the square is not.
        (
            _decoder("nemotron", "Nemotron"),
            {**dict.fromkeys("qkv", "none"), "o": "residual", "up": "relu", "down": "residual", "lm_head": "none"},
        ),
        (
            BERT,
            {"query": "bias", "key": "bias", "value": "bias", "decoder": "bias"}
            | {"output.dense": "bias+residual", "intermediate.dense": "bias+gelu", "transform.dense": "bias+gelu"},
        ),
        (
            GPT2,
            {"c_attn": "bias", "attn.c_proj": "bias+residual", "c_fc": "bias+gelu_tanh"}
            | {"mlp.c_proj": "bias+residual", "lm_head": "none"},
        ),
        (
            OPT,
            {**dict.fromkeys("qkv", "bias"), "out": "bias+residual", "fc1": "bias+relu"}
            | {"fc2": "bias+residual", "lm_head": "none"},
        ),
        (
            VIT,
            {**dict.fromkeys("qkv", "bias"), "o": "bias+residual", "fc1": "bias+gelu"}
            | {"fc2": "bias+residual", "classifier": "bias"},
        ),
        (
            {**T5, "feed_forward_proj": "relu"},
            {**dict.fromkeys("qkv", "none"), "o": "residual", "wi": "relu", "wo": "residual", "lm_head": "none"},
        ),
        (
            {**T5, "feed_forward_proj": "gated-gelu"},
            {**dict.fromkeys("qkv", "none"), "o": "residual", "wi_0": "gelu_tanh", "wi_1": "none"}
            | {"wo": "residual", "lm_head": "none"},
        ),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_a_model_proposes_what_its_forward_pass_does(
    config: dict[str, Any], expected: dict[str, str], load: Load
) -> None:
    workload = load(config)
    assert (proposals(workload), workload.notes) == (expected, ())


def test_activations_and_factors_that_no_epilogue_has(load: Load) -> None:
    found = proposals(load({**BERT, "hidden_act": "quick_gelu"}))
    assert (found["intermediate.dense"], found["output.dense"]) == ("bias", "bias+residual")
    # A factor for each channel goes between the projection and the residual.
    found = proposals(load({**VIT, "model_type": "dinov2", "architectures": ["Dinov2Model"]}))
    assert (found["fc1"], found["fc2"], found["o"]) == ("bias+gelu", "bias", "bias")


def test_residuals_of_another_dtype(load: Load) -> None:
    mamba = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "model_type": "mamba"}
    mamba["architectures"] = ["MambaForCausalLM"]
    assert proposals(load({**mamba, "residual_in_fp32": False}))["out"] == "residual"
    assert proposals(load({**mamba, "residual_in_fp32": True}))["out"] == "none"


def test_windows_are_in_another_order_than_the_residual(load: Load) -> None:
    config = {"model_type": "swin", "architectures": ["SwinModel"], "image_size": 56, "patch_size": 4}
    config |= {"embed_dim": 32, "depths": [2], "num_heads": [2], "window_size": 7}
    found = proposals(load(config))
    assert (found["o"], found["fc1"], found["fc2"]) == ("bias", "bias+gelu", "bias+residual")


def test_no_name_says_residual_outside_the_layers(load: Load) -> None:
    config = {**SIZES, "model_type": "xmod", "architectures": ["XmodForMaskedLM"], "pad_token_id": 0}
    workload = load({**config, "languages": ["en_XX"], "default_language": "en_XX"})
    found = proposals(workload)
    assert "go by the layers' names" in workload.notes[0]
    assert (found["output.dense"], found["lm_head.dense"]) == ("bias+residual", "bias")


@pytest.mark.parametrize(
    ("path", "residual"),
    [
        ("encoder.layer.0.proj", True),
        ("transformer.h.0.proj", True),
        ("encoder.proj", False),
        ("lm_head.0.proj", False),
        ("lm_head.proj", False),
        ("heads.0.transform.proj", False),
        ("towers.0.pooler.proj", False),
    ],
)
def test_names_of_layers_with_a_residual(path: str, residual: bool) -> None:
    from torch import nn
    from transformers import PretrainedConfig

    model: Any = nn.Module()
    model.config = PretrainedConfig()
    gemms = [Gemm(path.replace("proj", "fc1"), 8, 8), Gemm(path, 8, 8)]
    assert after_by_names(model, gemms)[path] == After(residual=residual)


def test_inputs_that_differ_are_not_merged(load: Load) -> None:
    config = {"model_type": "detr", "architectures": ["DetrModel"], "d_model": 64, "use_timm_backbone": False}
    config |= {"use_pretrained_backbone": False, "encoder_layers": 1, "decoder_layers": 1}
    paths = {layer.path for layer in load(config, fuse=True).layers}
    assert "encoder.layers.0.self_attn.v_proj" in paths
    assert not any("qkv_proj" in path for path in paths)


@pytest.mark.parametrize(
    ("config", "gate"),
    [
        (LLAMA, "swiglu"),
        ({**LLAMA, "mlp_bias": True}, "bias+swiglu"),
        ({**LLAMA, "hidden_act": "gelu"}, "geglu"),
        ({**LLAMA, "hidden_act": "gelu_pytorch_tanh"}, "none"),
        ({**LLAMA, "hidden_act": "relu"}, "none"),
        (GEMMA2, "none"),
        ({**T5, "feed_forward_proj": "gated-silu"}, "swiglu"),
        ({**T5, "feed_forward_proj": "gated-gelu"}, "none"),
        # Stored as one weight.
        (_decoder("phi3", "Phi3", pad_token_id=0), "swiglu"),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else value,
)
def test_merged_gate_and_up_have_a_gate_of_their_activation(config: dict[str, Any], gate: str, load: Load) -> None:
    found = proposals(load(config, fuse=True))
    assert found["gate_up"] == gate
    assert found["qkv"] == "none"
    up = next(layer for layer in load(config, fuse=True, epilogues="model").layers if "gate_up" in layer.path)
    assert up.family.out_columns == (96 if "glu" in gate else 192)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-14b"])
def test_the_shipped_decoders(name: str, load: Load) -> None:
    qkv = "bias" if name == "qwen2.5-7b" else "none"
    expected = {"qkv": qkv, "o": "residual", "gate_up": "swiglu", "down": "residual", "lm_head": "none"}
    workload = load(name, fuse=True)
    assert (proposals(workload), workload.notes) == (expected, ())
    assert len(workload.layers) == 5


def test_experts_and_routers_have_none_and_shared_experts_are_layers(load: Load) -> None:
    config = _decoder("mixtral", "Mixtral", num_local_experts=4)
    attention = {"q": "none", "k": "none", "v": "none", "o": "residual", "lm_head": "none"}
    assert proposals(load(config)) == {**attention, "gate": "none", "gate_up": "none", "down": "none"}
    config = _decoder("qwen2_moe", "Qwen2Moe", num_experts=4, moe_intermediate_size=32)
    config |= {"shared_expert_intermediate_size": 48}
    found = {layer.path: str(layer.proposed) for layer in load(config, fuse=True).layers}
    block = "model.layers.*.mlp."
    assert found[f"{block}experts.gate_up_proj"] == found[f"{block}experts.down_proj"] == "none"
    assert found[f"{block}shared_expert.gate_up_proj"] == "swiglu"
    # Scaled by its own gate before it is added.
    assert found[f"{block}shared_expert.down_proj"] == "none"


def test_experts_keep_their_bias(load: Load) -> None:
    config = _decoder("gpt_oss", "GptOss", head_dim=16, num_local_experts=4)
    found = {layer.path.partition("mlp.")[2]: str(layer.proposed) for layer in load(config).layers}
    assert found["experts.gate_up_proj"] == found["experts.down_proj"] == found["router"] == "bias"


@pytest.mark.parametrize(("tp", "row"), [(1, "bias+residual"), (2, "none")])
def test_row_parallel_layers_leave_everything_to_after_the_reduction(tp: int, row: str, load: Load) -> None:
    workload = load(BERT, tp=tp, epilogues="model")
    rows = [layer for layer in workload.layers if layer.parallel == ROW]
    assert [str(layer.family.epilogue) for layer in rows] == [row, row]
    found = proposals(workload)
    assert (found["query"], found["intermediate.dense"], found["decoder"]) == ("bias", "bias+gelu", "bias")
    # Without them, families are as they were.
    assert {str(layer.family.epilogue) for layer in load(BERT, tp=tp).layers} == {"bias"}


@pytest.mark.parametrize(
    ("way", "tp", "expected"),
    [
        (COLUMN, 1, "bias+gelu+residual"),
        # A rank has some of the columns, the residual has all.
        (COLUMN, 2, "bias+gelu"),
        (REPLICATED, 2, "bias+gelu+residual"),
        (ROW, 1, "bias+gelu+residual"),
        (ROW, 2, "none"),
    ],
)
def test_what_a_rank_can_fuse(way: str, tp: int, expected: str) -> None:
    gemm = Gemm("a.fc", 8, 8, True, after=After("gelu", residual=True))
    assert str(proposed(gemm, way, tp)) == expected


def test_the_head_has_its_bias_only() -> None:
    gemm = Gemm("lm_head", 8, 8, True, is_head=True, after=After("gelu", residual=True))
    assert str(proposed(gemm, COLUMN, 1)) == "bias"


@pytest.mark.parametrize(
    ("config", "exceptions"),
    [
        (LLAMA, {}),
        (GEMMA2, {}),
        (_decoder("qwen2", "Qwen2"), {}),
        (_decoder("granite", "Granite", residual_multiplier=0.22), {}),
        (_decoder("phi3", "Phi3", pad_token_id=0), {}),
        (_decoder("mixtral", "Mixtral", num_local_experts=4), {}),
        (BERT, {"transform.dense": "bias"}),
        (GPT2, {}),
        (OPT, {}),
        (VIT, {}),
        ({**T5, "feed_forward_proj": "relu"}, {}),
        ({**T5, "feed_forward_proj": "gated-gelu"}, {}),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_names_say_the_same_where_the_forward_pass_fails(
    config: dict[str, Any], exceptions: dict[str, str], load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no input\nfor this")

    for fuse in (False, True):
        seen = proposals(load(config, fuse=fuse))
        monkeypatch.setattr(watch, "_arguments", fail)
        path = tmp_path / "other" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
        named = load_workload(path, fuse=fuse, cache_dir=tmp_path / "other")
        monkeypatch.undo()
        assert proposals(named) == {**seen, **exceptions}
        (note,) = named.notes
        assert "go by the layers' names" in note
        assert note.endswith("RuntimeError: no input for this")


def test_parts_that_the_model_leaves_out_are_watched_by_themselves(load: Load) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {k: v for k, v in GEMMA2.items() if k not in ("architectures", "model_type")}
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": {**vision, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        "text_config": {**text, "model_type": "gemma3_text"},
    }
    workload = load(config)
    assert workload.notes == ()
    tower = {layer.path.rpartition(".")[2]: str(layer.proposed) for layer in workload.layers if "encoder" in layer.path}
    assert (tower["fc1"], tower["fc2"], tower["out_proj"]) == ("bias+gelu_tanh", "bias+residual", "bias+residual")
    text_rows = {layer.path.rpartition(".")[2]: str(layer.proposed) for layer in workload.layers}
    assert (text_rows["gate_proj"], text_rows["down_proj"]) == ("gelu_tanh", "none")


def test_choices_of_epilogues(load: Load) -> None:
    config = {**LLAMA, "vocab_size": 256}
    plain, fused, both = (load(config, fuse=True, epilogues=choice) for choice in ("none", "model", "both"))
    assert [str(layer.family.epilogue) for layer in plain.layers] == ["none"] * 5
    assert [layer.family.epilogue for layer in fused.layers] == [layer.proposed for layer in plain.layers]
    assert [str(f.epilogue) for f in fused.families()] == ["none", "residual", "swiglu", "residual", "none"]
    # Each is counted in full; what has no other epilogue is there once.
    assert both.families() == {**plain.families(), **fused.families()}
    assert [(layer.path.rpartition(".")[2], str(layer.family.epilogue)) for layer in both.layers] == [
        ("qkv_proj", "none"),
        ("o_proj", "none"),
        ("o_proj", "residual"),
        ("gate_up_proj", "none"),
        ("gate_up_proj", "swiglu"),
        ("down_proj", "none"),
        ("down_proj", "residual"),
        ("lm_head", "none"),
    ]
    assert {layer.count for layer in both.layers[:-1]} == {2}
    with pytest.raises(UsageError, match="epilogues is 'all'"):
        load(LLAMA, epilogues="all")


def test_the_choice_is_no_other_model(load: Load, tmp_path: Path) -> None:
    for choice in ("none", "model", "both"):
        load(BERT, epilogues=choice)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_lists_and_traces_keep_their_epilogues(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"n": 8, "k": 8, "epilogue": "bias+gelu", "m": 3}, {"n": 8, "k": 8}]))
    plain = load_workload(path)
    trace = Path(__file__).resolve().parents[1] / "data" / "trace"
    for choice in ("none", "model", "both"):
        assert load_workload(path, epilogues=choice) == plain
        assert load_workload(trace, epilogues=choice) == load_workload(trace)
    assert {layer.proposed for layer in plain.layers} == {None}


def test_a_proposal_that_changes_nothing_is_no_second_layer() -> None:
    biased = ProblemFamily.of(8, 8, epilogue="bias")
    layers = (Layer("a", biased, proposed=Epilogue(bias=True)), Layer("a", biased), Layer("a", biased, 2))
    assert Workload("w", layers).with_epilogues("both").layers == layers
