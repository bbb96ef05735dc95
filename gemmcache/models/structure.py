"""What comes after a GEMM, told by names: for models whose forward pass can't be watched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gemmcache.models.after import After
from gemmcache.models.fusion import GATES
from gemmcache.models.gemms import Gemm
from gemmcache.models.interface import COLUMN, ROW
from gemmcache.models.parallel import GATE_UP, directions

_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn", "act_fn")
#: The names that transformers has for the activations that epilogues know.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_UNGATED = frozenset({"fc1", "c_fc", "fc_in", "dense_h_to_4h", "lin1", "linear1", "wi"})
#: Norms between a projection and its residual, and factors on the way.
_BETWEEN = re.compile(r"post_feedforward_layernorm|post_self_attn_layernorm|post_mlp_layernorm|layer_?scale")
#: Components of what stands outside the repeated layers: no residual goes around it.
_OUTSIDE = frozenset({"lm_head", "transform", "pooler"})
_FACTORS = ("residual_multiplier", "scale_depth")


def after_by_names(model: Any, gemms: Sequence[Gemm]) -> dict[str, After]:
    """Path -> what its name, its siblings' names and the config say comes after it; nothing in doubt."""
    config = model.config.get_text_config()
    given = next((getattr(config, f) for f in _FIELDS if isinstance(getattr(config, f, None), str)), "")
    activation = _ACTIVATIONS.get(given)
    residual = not (
        any(_BETWEEN.search(name) for name, _ in model.named_modules())
        or any(getattr(config, factor, 1) != 1 for factor in _FACTORS)
    )
    ups = {names[0]: names[1] for names in GATES}
    paths = {gemm.path for gemm in gemms}
    ways = directions(gemms, getattr(model, "_tp_plan", None) or {})
    found = {}
    for gemm, way in zip(gemms, ways, strict=True):
        after = After()
        up = f"{gemm.parent}.{ups.get(gemm.leaf, '')}"
        if gemm.leaf in ups and up in paths:
            after = After(activation, times=up if activation else None)
        elif gemm.leaf in GATE_UP:
            after = After(gate=activation)
        elif way == COLUMN and (gemm.leaf in _UNGATED or gemm.path.endswith("intermediate.dense")):
            after = After(activation)
        elif way == ROW and residual and _in_layer(gemm.path):
            after = After(residual=True)
        found[gemm.path] = after
    return found


def _in_layer(path: str) -> bool:
    """Whether the path has a layer's number, and is no head's."""
    parts = path.split(".")
    return any(part.isdigit() for part in parts) and _OUTSIDE.isdisjoint(parts)
