"""Element types by the names torch gives them (`torch.<name>`), with their sizes; torch is not imported."""

from __future__ import annotations

from gemmcache.errors import UsageError

#: bytes per element
SIZES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int32": 4,
}

ALIASES: dict[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def dtype_name(text: str) -> str:
    """The canonical name of a dtype given by name or alias (`bf16`, `torch.bfloat16`, `bfloat16`).

    Raises `UsageError` for a name that gemmcache does not know.
    """
    name = text.removeprefix("torch.").lower()
    name = ALIASES.get(name, name)
    if name not in SIZES:
        raise UsageError(f"dtype '{text}' is not known", remedy=f"one of {', '.join([*SIZES, *ALIASES])}")
    return name


def accumulator_for(dtype: str) -> str:
    """The accumulator dtype that matrix units use for operands of `dtype`."""
    return "int32" if dtype == "int8" else "float32"
