"""The example model configs that come with gemmcache, by their short names."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_folder() -> Path:
    """The folder with one folder per model: in the package once installed, beside it in the repository."""
    installed = _PACKAGE / "_shipped" / "models"
    return installed if installed.is_dir() else _PACKAGE.parent / "artifacts" / "models"


def shipped_models() -> dict[str, Path]:
    """Short name -> config.json, sorted by name; empty where none are installed."""
    return {path.parent.name: path for path in sorted(shipped_folder().glob("*/config.json"))}
