"""Shared set-up: helpers of the tests are importable as `tests.<module>`, and hypothesis is reproducible."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
# The `pytest` script, unlike `python -m pytest`, leaves the working folder out.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Derandomized, so that a red build is red again; no deadline, since machines of CI stall.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The root folder of the repository."""
    return ROOT
