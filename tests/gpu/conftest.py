"""The bundle that the GPU tests serve: `GEMMCACHE_TEST_BUNDLE`, or one built here from the shipped records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT

MODEL = ROOT / "artifacts" / "models" / "llama-3.1-8b" / "config.json"


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory) -> Path:
    given = os.environ.get("GEMMCACHE_TEST_BUNDLE")
    if given:
        return Path(given)
    from gemmcache.cli.app import run

    folder = tmp_path_factory.mktemp("gpu") / "bundle"
    assert run(["build", str(MODEL), "--fuse", "--target", "native", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def bundle(bundle_path):
    import warnings

    import gemmcache
    from gemmcache.runtime.loader import StaleBundleWarning

    with warnings.catch_warnings():
        # The machine at hand may have another driver than the records.
        warnings.simplefilter("ignore", StaleBundleWarning)
        return gemmcache.load(bundle_path)


def is_plain(family) -> bool:
    """Whether `linear(x, w)` of bfloat16 matrices is all that it takes."""
    from gemmcache.problem import ProblemFamily

    return family == ProblemFamily.of(family.n, family.k)


@pytest.fixture(scope="session")
def kernel_case(bundle):
    """(family, m) of the first plain entry that a kernel serves with rows enough for views to differ."""
    for family, dispatcher in sorted(bundle.dispatchers.items(), key=lambda item: item[0].n):
        for entry in dispatcher.table.entries:
            if entry.kernel and entry.m >= 16 and is_plain(family):
                return family, entry.m
    pytest.skip("the bundle serves nothing plain by a kernel")


def epilogue_cases(bundle):
    """(family, m) of one kernel's entry for each epilogue, pair of dtypes and layouts that the bundle holds."""
    from gemmcache.kernels.interface import operands_of
    from tests.calls import can_be_called

    found = {}
    for family, dispatcher in sorted(bundle.dispatchers.items(), key=lambda item: (item[0].n, item[0].digest)):
        for entry in dispatcher.table.entries:
            if entry.kernel and entry.m >= 16 and can_be_called(family):
                found.setdefault(operands_of(family), (family, entry.m))
    return list(found.values())
