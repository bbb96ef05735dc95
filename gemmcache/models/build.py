"""A transformers model on the meta device: all of its modules, no weights, nothing from the network."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gemmcache.errors import MissingPackageError, UsageError

#: Sizes that a config must give if its class has them; transformers would fill in those of another model.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
#: More layers than any model has: a guard against a typo that would fill the memory with modules.
_MAX_LAYERS = 4096
#: Fields that would make transformers look for kernels, code or quantizers; shapes do not depend on them.
_IGNORED = (
    "auto_map",
    "quantization_config",
    "_attn_implementation",
    "attn_implementation",
    "dtype",
    "torch_dtype",
)


def build_model(config: dict[str, Any], where: str) -> Any:
    """The model that `config` (a parsed config.json) describes, on the meta device.

    The class is the one that `architectures` names, else the causal language model of the `model_type`, else
    its base model. Code from the config's repository never runs. `where` names the config in messages.
    Raises `UsageError` for an unknown architecture, a missing size, or anything else that transformers
    refuses, and `MissingPackageError` without transformers or a package that the model needs.
    """
    with quiet_and_offline():
        try:
            import transformers
        except ImportError as error:
            raise MissingPackageError(
                f"reading a model config needs {error.name}", remedy="pip install 'gemmcache[hf]'"
            ) from error
        config_class = _config_class(transformers, config, where)
        _require_sizes(config_class, config, where)
        try:
            parsed = config_class.from_dict({k: v for k, v in config.items() if k not in _IGNORED})
        except Exception as error:  # config classes raise whatever their fields lead to
            raise _refused(where, error) from error
        layers = getattr(parsed, "num_hidden_layers", 0)
        if isinstance(layers, int) and layers > _MAX_LAYERS:
            raise UsageError(f"{where}: {layers} layers are more than the {_MAX_LAYERS} allowed")
        model_class, parsed = _model_class(transformers, config, parsed, where)
        try:
            return _instantiate(model_class, parsed)
        except Exception as error:  # model classes raise whatever their sizes lead to
            raise _refused(where, error) from error


def _refused(where: str, error: Exception) -> UsageError | MissingPackageError:
    lines = str(error).strip().splitlines()
    reason = " ".join(line.strip() for line in lines[:3])
    if isinstance(error, ImportError):
        return MissingPackageError(
            f"{where}: transformers needs another package for this model: {reason}",
            remedy="install it, or list the problems in a JSON file",
        )
    return UsageError(
        f"{where}: transformers can't build this model: {type(error).__name__}: {reason}",
        remedy="check the config's sizes against each other, or list the problems in a JSON file",
    )


def _config_class(transformers: Any, config: dict[str, Any], where: str) -> Any:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UsageError(
            f"{where}: field 'model_type' is missing or not text",
            remedy="add the name that transformers has for this kind of model, for example llama",
        )
    if model_type in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[model_type]
    if "auto_map" in config:
        raise UsageError(
            f"{where}: model type '{model_type}' is not in transformers {transformers.__version__}, "
            "and the config's own Python code ('auto_map') is never run here",
            remedy="use a transformers release that has this model type, or list the problems in a JSON file",
        )
    raise UsageError(
        f"{where}: model type '{model_type}' is not in transformers {transformers.__version__}",
        remedy="update transformers, correct 'model_type', or list the problems in a JSON file",
    )


def _require_sizes(config_class: Any, config: dict[str, Any], where: str) -> None:
    if getattr(config_class, "sub_configs", None):
        return  # the sizes are in parts that may leave out what is the same in the original
    aliases = getattr(config_class, "attribute_map", {})
    own = set(inspect.signature(config_class).parameters)
    for size in _SIZES:
        name = aliases.get(size, size)
        if name in own and config.get(name) is None and config.get(size) is None:
            default = inspect.signature(config_class).parameters[name].default
            if isinstance(default, int):
                raise UsageError(
                    f"{where}: field '{name}' is missing",
                    remedy=f"add it (transformers would assume {default}, which may not be this model's)",
                )


def _model_class(transformers: Any, config: dict[str, Any], parsed: Any, where: str) -> tuple[Any, Any]:
    """The class to build and the config to build it from."""
    architectures = config.get("architectures")
    if not architectures:
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
            if type(parsed) in auto._model_mapping:
                found = auto._model_mapping[type(parsed)]
                found = found[0] if isinstance(found, (list, tuple)) else found
                # The causal language model of a model with several parts takes the text part's config.
                whole = isinstance(parsed, getattr(found, "config_class", None) or object)
                return found, parsed if whole else parsed.get_text_config()
        raise UsageError(
            f"{where}: transformers has no model for '{parsed.model_type}'",
            remedy="name one in 'architectures'",
        )
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise UsageError(f"{where}: field 'architectures' must be a list of class names")
    name = architectures[0]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UsageError(
            f"{where}: architecture '{name}' is not in transformers {transformers.__version__}",
            remedy="update transformers, correct 'architectures', or list the problems in a JSON file",
        )
    wanted = getattr(found, "config_class", None)
    if wanted is not None and not isinstance(parsed, wanted):
        raise UsageError(
            f"{where}: architecture '{name}' does not go with model type '{parsed.model_type}'",
            remedy=f"correct one of them: the class belongs to '{wanted.model_type}'",
        )
    return found, parsed


def _instantiate(model_class: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        # One dtype for building, whatever the config says: shapes do not depend on it, and an 8-bit one
        # can't be torch's default. Eager attention needs no optional package.
        return model_class._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")


@contextmanager
def quiet_and_offline() -> Iterator[None]:
    """No warnings, log lines or progress from transformers, and no connection to a hub, inside."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # The hub's client reads its variable when it is imported: before ours is set, so that it
        # keeps the caller's setting afterwards.
        try:
            from huggingface_hub import constants
        except ImportError:  # the caller reports the missing package
            pass
        else:
            stack.callback(setattr, constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
            constants.HF_HUB_OFFLINE = True
        before = os.environ.get("HF_HUB_OFFLINE")
        stack.callback(_set_variable, "HF_HUB_OFFLINE", before)
        _set_variable("HF_HUB_OFFLINE", "1")
        try:
            from transformers.utils import logging
        except ImportError:
            pass
        else:
            stack.callback(logging.set_verbosity, logging.get_verbosity())
            if logging.is_progress_bar_enabled():
                stack.callback(logging.enable_progress_bar)
            logging.set_verbosity(logging.CRITICAL + 1)
            logging.disable_progress_bar()
        yield


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
