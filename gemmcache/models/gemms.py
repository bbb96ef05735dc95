"""The GEMMs of a built model, one by one: what its modules multiply by, found by structure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gemmcache.models.after import After

_HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts", "n_total_experts")

_ROUTER = re.compile(r"Router|Gate(?!d)|Gating")
_EXPERT = re.compile(r"expert", re.IGNORECASE)
_PROJECTION = re.compile(r"proj(ection)?(_weight)?$")
#: A component of a path: experts that every token goes through (`shared_experts`) are like any other layer.
_EXPERTS_PATH = re.compile(r"(?<![^.])experts(?![^.])")
_CROSS = re.compile(r"cross|encoder_?attn|enc_?dec", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gemm:
    """One weight `[N, K]` of a model and how often a forward pass multiplies by it (`count`).

    `head_dim`, `v_head_dim` and `kv_heads` are what the module around it says of its attention heads (None
    where it says nothing); `cross`: that module is a cross-attention; `is_head`: the language model's head;
    `after`: what the model does with the output, for whoever has watched it.
    """

    path: str
    n: int
    k: int
    bias: bool = False
    count: int = 1
    head_dim: int | None = None
    v_head_dim: int | None = None
    kv_heads: int | None = None
    cross: bool = False
    is_head: bool = False
    after: After = field(default_factory=After)

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_expert(self) -> bool:
        """Whether the weight is one of a mixture's experts, which see the tokens routed to them only."""
        return bool(_EXPERTS_PATH.search(self.path))


def gemms_of(model: Any) -> list[Gemm]:
    """Every GEMM with a weight in `model` (a transformers model, may be on the meta device), in module order.

    Found are `nn.Linear`, transformers' `Conv1D` (which stores `[K, N]`; listed as the `[N, K]` that servers
    turn it into), the packed input projection of `nn.MultiheadAttention`, expert parameters of
    mixture-of-experts blocks (one entry a parameter, `count` being the number of experts; with t tokens, m is
    about t * top_k / experts for each), routers, and bare parameters whose names say projection. The language
    model's head is listed whether tied or not. Convolutions and products of two activations are left out.
    A module registered twice runs twice.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    head = _head(model)
    repeats = _repeats(model.config)
    found = []
    for path, module in modules.items():
        parent = modules.get(path.rpartition(".")[0], model)
        for name, n, k, bias, count in _weights(module):
            full = ".".join(part for part in (path, name) if part)
            # A parameter of the attention module itself: that module knows the heads.
            around = module if name else parent
            found.append(
                Gemm(
                    path=full,
                    n=n,
                    k=k,
                    bias=bias,
                    count=count * repeats(full),
                    head_dim=_number(around, _HEAD_DIM),
                    v_head_dim=_number(around, ("v_head_dim",)),
                    kv_heads=_number(around, _KV_HEADS),
                    cross=bool(_CROSS.search(full.rpartition(".")[0]) or _CROSS.search(type(around).__name__)),
                    is_head=module is head,
                )
            )
    return found


def _weights(module: Any) -> Iterator[tuple[str, int, int, bool, int]]:
    """(parameter name or empty, N, K, has a bias, count) of the GEMMs that `module` itself holds."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        yield "", module.out_features, module.in_features, module.bias is not None, 1
    elif isinstance(module, Conv1D):
        k, n = module.weight.shape
        yield "", n, k, module.bias is not None, 1
    elif isinstance(module, nn.MultiheadAttention):
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = getattr(module, name)
            if weight is not None:
                yield name, weight.shape[0], weight.shape[1], module.in_proj_bias is not None, 1
    elif _EXPERT.search(type(module).__name__):
        yield from _experts(module)
    elif _ROUTER.search(type(module).__name__):
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.ndim == 2:
            yield "", weight.shape[0], weight.shape[1], getattr(module, "bias", None) is not None, 1
    else:
        for name, parameter in module.named_parameters(recurse=False):
            # A bare matrix that activations are multiplied by from the right: [K, N].
            if parameter.ndim == 2 and _PROJECTION.search(name):
                yield name, parameter.shape[1], parameter.shape[0], False, 1


def _experts(module: Any) -> Iterator[tuple[str, int, int, bool, int]]:
    """Parameters that hold the weights of all experts: `[E, N, K]`, `[E, K, N]`, or `[E * rows, columns]`."""
    parameters = dict(module.named_parameters(recurse=False))
    hidden = _number(module, ("hidden_size", "hidden_dim"))
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        bias = f"{name}_bias" in parameters or (name == "weight" and "bias" in parameters)
        down = "down" in name or name == "w2"
        if len(shape) == 3:
            experts, n, k = shape
            # `is_transposed` is transformers' own word for [E, K, N]; where a class lacks it, sizes tell.
            transposed = getattr(module, "is_transposed", False) or (
                hidden is not None and n != k and hidden == (k if down else n)
            )
            yield (name, k, n, bias, experts) if transposed else (name, n, k, bias, experts)
        elif len(shape) == 2 and "bias" not in name:
            experts = _number(module, _EXPERTS) or 0
            if experts and shape[0] % experts == 0 and shape[0] > experts:
                rows = shape[0] // experts
                yield (name, shape[1], rows, bias, experts) if down else (name, rows, shape[1], bias, experts)


def _number(module: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _head(model: Any) -> object:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _repeats(config: Any) -> Callable[[str], int]:
    """How often a forward pass runs the module at a path: more than once where layers share their weights."""
    if getattr(config, "model_type", "") != "albert" or config.num_hidden_groups < 1:
        return lambda path: 1
    layers, groups = config.num_hidden_layers, config.num_hidden_groups
    runs = [0] * groups
    for layer in range(layers):
        runs[int(layer / (layers / groups))] += 1

    def repeats(path: str) -> int:
        match = re.search(r"albert_layer_groups\.(\d+)\.", path)
        return runs[int(match[1])] if match else 1

    return repeats
