"""Model configs, built on the meta device: exact shapes, counts and biases."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemmcache.errors import MissingPackageError, UsageError
from gemmcache.models.interface import COLUMN, REPLICATED, ROW, Workload
from gemmcache.models.shipped import shipped_models
from gemmcache.models.source import load_workload

Rows = list[tuple[str, int, int, int, str]]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "dtype": "float16",
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def load(tmp_path: Path, cache: Path) -> Callable[..., Workload]:
    def load(config: Any, **options: Any) -> Workload:
        path = tmp_path / "model" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return load_workload(path, cache_dir=cache, **options)

    return load


def rows(workload: Workload) -> Rows:
    return [(e.path, e.count, e.family.n, e.family.k, str(e.family.epilogue)) for e in workload.layers]


def test_llama_8b(cache: Path) -> None:
    workload = load_workload("llama-3.1-8b", cache_dir=cache)
    layer = "model.layers.*."
    assert rows(workload) == [
        (layer + "self_attn.q_proj", 32, 4096, 4096, "none"),
        (layer + "self_attn.k_proj", 32, 1024, 4096, "none"),
        (layer + "self_attn.v_proj", 32, 1024, 4096, "none"),
        (layer + "self_attn.o_proj", 32, 4096, 4096, "none"),
        (layer + "mlp.gate_proj", 32, 14336, 4096, "none"),
        (layer + "mlp.up_proj", 32, 14336, 4096, "none"),
        (layer + "mlp.down_proj", 32, 4096, 14336, "none"),
        ("lm_head", 1, 128256, 4096, "none"),
    ]
    assert workload.name == "llama-3.1-8b"
    assert {e.family.a_dtype for e in workload.layers} == {"bfloat16"}
    assert list(workload.families().values()) == [64, 64, 64, 32, 1]


def test_llama_8b_fused(cache: Path) -> None:
    assert rows(load_workload("llama-3.1-8b", fuse=True, cache_dir=cache)) == [
        ("model.layers.*.self_attn.qkv_proj", 32, 6144, 4096, "none"),
        ("model.layers.*.self_attn.o_proj", 32, 4096, 4096, "none"),
        ("model.layers.*.mlp.gate_up_proj", 32, 28672, 4096, "none"),
        ("model.layers.*.mlp.down_proj", 32, 4096, 14336, "none"),
        ("lm_head", 1, 128256, 4096, "none"),
    ]


def test_qwen_7b_has_biases_on_qkv_only(cache: Path) -> None:
    found = rows(load_workload("qwen2.5-7b", fuse=True, cache_dir=cache))
    assert found[:2] == [
        ("model.layers.*.self_attn.qkv_proj", 28, 4608, 3584, "bias"),
        ("model.layers.*.self_attn.o_proj", 28, 3584, 3584, "none"),
    ]
    assert found[2:] == [
        ("model.layers.*.mlp.gate_up_proj", 28, 37888, 3584, "none"),
        ("model.layers.*.mlp.down_proj", 28, 3584, 18944, "none"),
        ("lm_head", 1, 152064, 3584, "none"),
    ]


def test_bert(cache: Path) -> None:
    workload = load_workload("bert-base-uncased", cache_dir=cache)
    layer = "bert.encoder.layer.*."
    assert rows(workload) == [
        (layer + "attention.self.query", 12, 768, 768, "bias"),
        (layer + "attention.self.key", 12, 768, 768, "bias"),
        (layer + "attention.self.value", 12, 768, 768, "bias"),
        (layer + "attention.output.dense", 12, 768, 768, "bias"),
        (layer + "intermediate.dense", 12, 3072, 768, "bias"),
        (layer + "output.dense", 12, 768, 3072, "bias"),
        ("cls.predictions.transform.dense", 1, 768, 768, "bias"),
        ("cls.predictions.decoder", 1, 30522, 768, "bias"),
    ]
    assert [e.parallel for e in workload.layers] == [COLUMN] * 3 + [ROW, COLUMN, ROW, REPLICATED, COLUMN]


@pytest.mark.parametrize(
    ("name", "qkv", "o", "mlp", "layers", "vocab"),
    [
        ("llama-3.1-70b", (10240, 8192), (8192, 8192), 28672, 80, 128256),
        ("mistral-7b-v0.3", (6144, 4096), (4096, 4096), 14336, 32, 32768),
        ("qwen3-14b", (7168, 5120), (5120, 5120), 17408, 40, 151936),
    ],
)
def test_the_other_shipped_models(
    name: str, qkv: tuple[int, int], o: tuple[int, int], mlp: int, layers: int, vocab: int, cache: Path
) -> None:
    hidden = qkv[1]
    assert [row[1:4] for row in rows(load_workload(name, fuse=True, cache_dir=cache))] == [
        (layers, *qkv),
        (layers, *o),
        (layers, 2 * mlp, hidden),
        (layers, hidden, mlp),
        (1, vocab, hidden),
    ]


def test_six_models_are_shipped() -> None:
    assert sorted(shipped_models()) == [
        "bert-base-uncased",
        "llama-3.1-70b",
        "llama-3.1-8b",
        "mistral-7b-v0.3",
        "qwen2.5-7b",
        "qwen3-14b",
    ]


@pytest.mark.parametrize(
    ("tp", "sizes"),
    [
        (2, [(5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336), (64128, 8192)]),
        (8, [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (16032, 8192)]),
        # 16 ranks and 8 key/value heads: each rank has one whole head.
        (16, [(768, 8192), (8192, 512), (3584, 8192), (8192, 1792), (8016, 8192)]),
    ],
)
def test_tensor_parallel_70b(tp: int, sizes: list[tuple[int, int]], cache: Path) -> None:
    workload = load_workload("llama-3.1-70b", fuse=True, tp=tp, cache_dir=cache)
    assert [(e.family.n, e.family.k) for e in workload.layers] == sizes
    assert [e.parallel for e in workload.layers] == [COLUMN, ROW, COLUMN, ROW, COLUMN]
    parts = load_workload("llama-3.1-70b", tp=tp, cache_dir=cache).layers[:3]
    assert sum(e.family.n for e in parts) == sizes[0][0]


def test_heads_that_do_not_divide(cache: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json: model\.layers\.0\.self_attn\.q_proj: query heads, 28"):
        load_workload("qwen2.5-7b", tp=8, cache_dir=cache)


def test_explicit_head_dim_attention_bias_and_tied_head(load: Callable[..., Workload]) -> None:
    workload = load({**LLAMA, "head_dim": 32, "attention_bias": True, "tie_word_embeddings": True})
    assert rows(workload) == [
        ("model.layers.*.self_attn.q_proj", 2, 128, 64, "bias"),
        ("model.layers.*.self_attn.k_proj", 2, 64, 64, "bias"),
        ("model.layers.*.self_attn.v_proj", 2, 64, 64, "bias"),
        ("model.layers.*.self_attn.o_proj", 2, 64, 128, "bias"),
        ("model.layers.*.mlp.gate_proj", 2, 96, 64, "none"),
        ("model.layers.*.mlp.up_proj", 2, 96, 64, "none"),
        ("model.layers.*.mlp.down_proj", 2, 64, 96, "none"),
        ("lm_head", 1, 128, 64, "none"),
    ]


def test_mixtral_experts_and_router(load: Callable[..., Workload]) -> None:
    config = {
        **LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 6,
    }
    workload = load(config, fuse=True)
    assert rows(workload) == [
        ("model.layers.*.self_attn.qkv_proj", 2, 128, 64, "none"),
        ("model.layers.*.self_attn.o_proj", 2, 64, 64, "none"),
        ("model.layers.*.mlp.gate", 2, 6, 64, "none"),
        ("model.layers.*.mlp.experts.gate_up_proj", 12, 192, 64, "none"),
        ("model.layers.*.mlp.experts.down_proj", 12, 64, 96, "none"),
        ("lm_head", 1, 128, 64, "none"),
    ]
    split = {e.path.rpartition(".")[2]: e for e in load(config, fuse=True, tp=2).layers}
    assert (split["gate_up_proj"].family.n, split["gate_up_proj"].family.k) == (96, 64)
    assert (split["down_proj"].family.n, split["down_proj"].family.k) == (64, 48)
    assert (split["gate"].family.n, split["gate"].parallel) == (6, REPLICATED)


def test_qwen3_moe_with_a_dense_layer(load: Callable[..., Workload]) -> None:
    workload = load(
        {
            **LLAMA,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
        fuse=True,
    )
    assert rows(workload) == [
        ("model.layers.*.self_attn.qkv_proj", 3, 128, 64, "none"),
        ("model.layers.*.self_attn.o_proj", 3, 64, 64, "none"),
        ("model.layers.0.mlp.gate_up_proj", 1, 192, 64, "none"),
        ("model.layers.0.mlp.down_proj", 1, 64, 96, "none"),
        ("model.layers.*.mlp.experts.gate_up_proj", 8, 48, 64, "none"),
        ("model.layers.*.mlp.experts.down_proj", 8, 64, 24, "none"),
        ("model.layers.*.mlp.gate", 2, 4, 64, "none"),
        ("lm_head", 1, 128, 64, "none"),
    ]


def test_transposed_experts_with_bias(load: Callable[..., Workload]) -> None:
    config = {**LLAMA, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16}
    found = rows(load({**config, "num_local_experts": 4}))
    assert ("model.layers.*.mlp.experts.gate_up_proj", 8, 192, 64, "bias") in found
    assert ("model.layers.*.mlp.experts.down_proj", 8, 64, 96, "bias") in found
    assert ("model.layers.*.mlp.router", 2, 4, 64, "bias") in found


def test_transposed_experts_told_by_sizes(load: Callable[..., Workload]) -> None:
    config = {**LLAMA, "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "head_dim": 16}
    found = rows(load({**config, "num_local_experts": 4, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 1}))
    assert ("model.layers.*.feed_forward.experts.gate_up_proj", 8, 192, 64, "none") in found
    assert ("model.layers.*.feed_forward.experts.down_proj", 8, 64, 96, "none") in found


def test_gpt2_conv1d_is_listed_as_n_by_k(load: Callable[..., Workload]) -> None:
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    workload = load({**config, "vocab_size": 128}, fuse=True, tp=2)
    assert rows(workload) == [
        ("transformer.h.*.attn.c_attn", 2, 96, 64, "bias"),
        ("transformer.h.*.attn.c_proj", 2, 64, 32, "bias"),
        ("transformer.h.*.mlp.c_fc", 2, 128, 64, "bias"),
        ("transformer.h.*.mlp.c_proj", 2, 64, 128, "bias"),
        ("lm_head", 1, 64, 64, "none"),
    ]


def test_a_weight_that_is_stored_fused_splits_by_heads(load: Callable[..., Workload]) -> None:
    config = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
    assert [row[:4] for row in rows(load(config, tp=4))] == [
        ("model.layers.*.self_attn.o_proj", 2, 64, 16),
        # One query head and one (replicated) key and value head of 16.
        ("model.layers.*.self_attn.qkv_proj", 2, 48, 64),
        ("model.layers.*.mlp.gate_up_proj", 2, 48, 64),
        ("model.layers.*.mlp.down_proj", 2, 64, 24),
        ("lm_head", 1, 32, 64),
    ]


def test_cross_attention_is_not_fused(load: Callable[..., Workload]) -> None:
    workload = load(
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": 64,
            "d_ff": 96,
            "d_kv": 16,
            "num_heads": 4,
            "num_layers": 2,
            "vocab_size": 128,
            "feed_forward_proj": "gated-gelu",
        },
        fuse=True,
    )
    paths = [e.path for e in workload.layers]
    assert "decoder.block.*.layer.0.SelfAttention.qkv_proj" in paths
    assert "decoder.block.*.layer.1.EncDecAttention.q" in paths
    assert "encoder.block.*.layer.1.DenseReluDense.gate_up_proj" in paths


def test_layers_that_share_weights_count_each_run(load: Callable[..., Workload]) -> None:
    workload = load(
        {
            "model_type": "albert",
            "architectures": ["AlbertModel"],
            "embedding_size": 16,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_hidden_groups": 2,
            "num_attention_heads": 4,
            "vocab_size": 128,
        }
    )
    counts = {e.path: e.count for e in workload.layers}
    assert counts["encoder.albert_layer_groups.*.albert_layers.0.ffn"] == 6
    assert counts["pooler"] == 1


def test_packed_input_projection_and_bare_projection(load: Callable[..., Workload]) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {k: v for k, v in LLAMA.items() if k not in ("architectures", "model_type", "dtype")}
    workload = load(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "vision_config": {
                **vision,
                "model_type": "siglip_vision_model",
                "image_size": 28,
                "patch_size": 14,
            },
            "text_config": {**text, "model_type": "gemma3_text", "head_dim": 16, "dtype": "float16"},
        }
    )
    found = {path.rpartition("model.")[2]: row for path, *row in rows(workload)}
    assert found["vision_tower.head.attention.in_proj_weight"] == [1, 96, 32, "bias"]
    assert found["multi_modal_projector.mm_input_projection_weight"] == [1, 64, 32, "none"]
    # The dtype is the text part's, where the whole has none.
    assert {e.family.a_dtype for e in workload.layers} == {"float16"}


def test_without_architectures_the_causal_model_is_built(load: Callable[..., Workload]) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "architectures"}
    assert rows(load(config))[-1] == ("lm_head", 1, 128, 64, "none")
    vit = {"model_type": "vit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    assert "lm_head" not in [e.path for e in load({**vit, "num_attention_heads": 2}).layers]


@pytest.mark.parametrize(
    ("config", "given", "operands", "out"),
    [
        ({"dtype": "float16"}, None, "float16", "float16"),
        ({"torch_dtype": "float16", "dtype": None}, None, "float16", "float16"),
        ({"dtype": None}, None, "bfloat16", "bfloat16"),
        ({"dtype": "float32"}, "fp16", "float16", "float16"),
        ({"dtype": "float16"}, "fp8", "float8_e4m3fn", "float16"),
        (
            {"dtype": "float16", "quantization_config": {"quant_method": "fp8"}},
            "e4m3",
            "float8_e4m3fn",
            "float16",
        ),
        ({"dtype": "float8_e4m3fn"}, None, "float8_e4m3fn", "bfloat16"),
    ],
)
def test_dtypes(
    config: dict[str, Any], given: str | None, operands: str, out: str, load: Callable[..., Workload]
) -> None:
    family = load({**LLAMA, **config}, dtype=given).layers[0].family
    assert (family.a_dtype, family.b_dtype, family.out_dtype) == (operands, operands, out)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        ('{"model_type": "llama", "model_type": "bert"}', "'model_type' is repeated"),
        ('{"hidden_size": NaN}', "NaN"),
        ("[" * 100_000, "not valid JSON"),
        ({k: v for k, v in LLAMA.items() if k != "model_type"}, "field 'model_type' is missing"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "field 'hidden_size' is missing"),
        (
            {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"},
            "field 'num_hidden_layers' is missing",
        ),
        ({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "vocab_size": 128}, "field 'n_embd' is missing"),
        ({**LLAMA, "model_type": "nonesuch"}, "model type 'nonesuch' is not in transformers"),
        ({**LLAMA, "model_type": "nonesuch", "auto_map": {"AutoConfig": "x.Y"}}, "never run"),
        ({**LLAMA, "architectures": ["NoneSuch"]}, "architecture 'NoneSuch' is not in transformers"),
        ({**LLAMA, "architectures": ["pipeline"]}, "architecture 'pipeline' is not in transformers"),
        ({**LLAMA, "architectures": ["BertModel"]}, "'BertModel' does not go with model type 'llama'"),
        ({**LLAMA, "architectures": "LlamaForCausalLM"}, "'architectures' must be a list"),
        ({**LLAMA, "hidden_size": "wide"}, "transformers can't build this model"),
        ({**LLAMA, "hidden_size": -64}, "transformers can't build this model"),
        ({**LLAMA, "num_hidden_layers": 1_000_000_000}, "more than the 4096"),
        ({**LLAMA, "vocab_size": 1 << 40}, "n is 1099511627776"),
        ({**LLAMA, "dtype": "complex64"}, "field 'dtype': dtype 'complex64' is not known"),
        ({**LLAMA, "dtype": 16}, "field 'dtype': is 16, not text"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "the model is quantized"),
        ({"model_type": "resnet", "architectures": ["ResNetModel"]}, "no linear layers"),
    ],
)
def test_errors_name_file_and_field(config: Any, message: str, load: Callable[..., Workload], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(config)
    assert message in caught.value.message
    assert str(tmp_path / "model" / "config.json") in caught.value.message


def test_a_package_that_the_model_needs_is_named(
    load: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmcache.models import build

    def refuse(*_: object) -> None:
        raise ImportError("\nThis model requires the timm library")

    monkeypatch.setattr(build, "_instantiate", refuse)
    with pytest.raises(MissingPackageError, match="timm"):
        load(LLAMA)


def test_code_of_the_repository_is_never_run(load: Callable[..., Workload], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    load({**LLAMA, "auto_map": auto_map})
    with pytest.raises(UsageError):
        load({**LLAMA, "model_type": "evil", "auto_map": auto_map})
    assert not (tmp_path / "ran").exists()


def test_no_connection_is_attempted_and_settings_are_restored(
    load: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(LLAMA)  # imports done
    from huggingface_hub import constants
    from transformers.utils import logging

    attempts: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        attempts.append(arguments)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    before = logging.get_verbosity()
    load({**LLAMA, "_name_or_path": "someone/model", "vocab_size": 256})
    backbone = {
        "backbone": "microsoft/resnet-50",
        "use_pretrained_backbone": True,
        "use_timm_backbone": False,
    }
    with pytest.raises((UsageError, MissingPackageError)):
        load({"model_type": "detr", "architectures": ["DetrModel"], "num_hidden_layers": 1, **backbone})
    assert attempts == []
    assert constants.HF_HUB_OFFLINE is False
    assert logging.get_verbosity() == before
    assert "HF_HUB_OFFLINE" not in os.environ
