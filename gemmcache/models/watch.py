"""A model's forward pass on the meta device, watched for what it does after each linear layer."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from gemmcache.models.after import After
from gemmcache.models.gemms import Gemm
from gemmcache.models.structure import after_by_names

#: Sequences and tokens in each: small, more than one, and no size that a model has elsewhere.
_BATCH, _TOKENS = 2, 7


def watch(model: Any, gemms: Sequence[Gemm]) -> tuple[dict[str, After], tuple[str, ...]]:
    """Path -> what comes after that linear layer, and notes on what could not be seen.

    `model` (on the meta device) runs once with a tiny input; parts of it that this leaves out, such as the
    vision tower of a language model, run by themselves. Layers that run nowhere, all of them where the forward
    pass fails, go by their names (`structure.after_by_names`), and a note says so. Paths that hold no linear
    module (parameters of experts, packed projections) are not in the map. Never raises for a model's own errors.
    """
    from transformers import PreTrainedModel

    layers = _layers(model)
    found: dict[str, After] = {}
    reason = "it does not run them"
    parts = [model, *(m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel))]
    for part in parts:
        own = set(part.modules())
        if all(path in found for module, paths in layers.items() if module in own for path in paths):
            continue
        seen, failure = _run(part, layers)
        found = {**seen, **found}
        if failure and part is model:
            reason = failure
    wanted = [g for g in gemms if not g.is_expert and any(g.path in paths for paths in layers.values())]
    unseen = {g.path for g in wanted if g.path not in found}
    if not unseen:
        return found, ()
    named = after_by_names(model, gemms)
    note = (
        f"the proposed epilogues of {len(unseen)} of {len(wanted)} linear layers go by the layers' names, "
        f"not by the model's own forward pass: {reason}"
    )
    return {**found, **{path: named[path] for path in unseen}}, (note,)


def _layers(model: Any) -> dict[Any, list[str]]:
    """Each module that is a linear layer -> its paths."""
    from torch import nn
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
    from transformers.pytorch_utils import Conv1D

    layers: dict[Any, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        # That of nn.MultiheadAttention is never called: the attention reads its weight.
        if isinstance(module, (nn.Linear, Conv1D)) and not isinstance(module, NonDynamicallyQuantizableLinear):
            layers[module].append(path)
    return layers


def _run(model: Any, layers: dict[Any, list[str]]) -> tuple[dict[str, After], str]:
    """What comes after the layers that `model` runs, and why it failed: then nothing that it did counts."""
    import torch

    from gemmcache.models.graph import Recorder

    failure = ""
    # As served, or for models that mix their weights with what they make in torch's default.
    for dtype in (torch.bfloat16, torch.float32):
        recorder = Recorder()
        with ExitStack() as stack:
            for module in model.modules():
                if module in layers:
                    hook = _hook(recorder, layers[module])
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            try:
                model.eval().to("meta", dtype)
                arguments = _arguments(model, dtype)
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch.device("meta"))  # for what the model makes itself
                stack.enter_context(recorder)
                recorder.read(model(**arguments))
                return recorder.after(), ""
            except Exception as error:  # noqa: BLE001 - models raise whatever a tiny input leads to; told in a note
                reason = " ".join(str(error).split()) or "no message"
                failure = failure or f"{type(error).__name__}: {reason[:200]}"
    return {}, failure


def _hook(recorder: Any, paths: Sequence[str]) -> Any:
    import torch

    def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        a = next(iter((*args, *kwargs.values())), None)
        if isinstance(a, torch.Tensor) and isinstance(out, torch.Tensor):
            recorder.gemm(paths, a, out)
        else:
            recorder.opaque(paths)

    return hook


def _arguments(model: Any, dtype: Any) -> dict[str, Any]:
    """A tiny input of the model's kind: tokens, pixels, or sound."""
    import torch

    names = set(inspect.signature(model.forward).parameters)
    tokens = torch.zeros((_BATCH, _TOKENS), dtype=torch.int64, device="meta")
    main = model.main_input_name if {model.main_input_name, "kwargs"} & names else "input_ids"
    shape = _shape(main, model.config)
    arguments: dict[str, Any] = {main: torch.empty(shape, dtype=dtype, device="meta") if shape else tokens}
    if "decoder_input_ids" in names:
        arguments["decoder_input_ids"] = tokens
    if "use_cache" in names:
        arguments["use_cache"] = False
    return arguments


def _shape(name: str, config: Any) -> tuple[int, ...] | None:
    """The shape of an input that is no tokens."""
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        sides = list(size.values()) if isinstance(size, dict) else [size, size] if isinstance(size, int) else list(size)
        return (_BATCH, _field(config, "num_channels", 3), *sides[:2])
    if name == "input_features":
        return _BATCH, _field(config, "num_mel_bins", 80), 2 * _field(config, "max_source_positions", 1500)
    return (_BATCH, 16000) if name == "input_values" else None


def _field(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else default
