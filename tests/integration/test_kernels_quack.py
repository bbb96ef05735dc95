"""quack's kernels, compiled for real: every epilogue, both operand orders, beside another family in one process."""

from __future__ import annotations

import pytest

from gemmcache.build.compile import compile_kernels
from gemmcache.build.link import link
from gemmcache.build.objects import ObjectCache
from gemmcache.bundle import elf
from gemmcache.bundle.interface import function_name, symbol_name
from gemmcache.kernels.identity import detect_toolchain, kernel_digest
from gemmcache.kernels.quack.family import EPILOGUES, installed
from gemmcache.kernels.registry import kernel_families
from gemmcache.problem import ProblemFamily
from gemmcache.target import TARGETS, detect_host
from tests.integration.commands import needs_compiler
from tests.integration.test_kernels import gpu_arch

pytestmark = [
    pytest.mark.compile,
    needs_compiler,
    pytest.mark.skipif(not installed(), reason="the pinned quack-kernels is not installed"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Objects by digest, and what each is for: (epilogue, swapped operands) or the name of another target."""
    families = kernel_families()
    toolchain, host = detect_toolchain(families.values()), detect_host()
    specs, meant = {}, {}

    def add(family, problem_family, target, config, what):
        spec = families[family].spec(config, problem_family, TARGETS[target])
        digest = kernel_digest(spec, toolchain, host)
        specs[digest], meant[digest] = spec, what

    for epilogue in EPILOGUES:
        problem_family = ProblemFamily.of(4096, 4096, epilogue=epilogue)
        configs = list(families["quack"].configs(problem_family, TARGETS["h200"]))
        for swap_ab in (False, True):
            config = next(c for c in configs if c["swap_ab"] is swap_ab and c["pingpong"] is swap_ab)
            add("quack", problem_family, "h200", config, (epilogue, swap_ab))
    plain = ProblemFamily.of(4096, 4096)
    for target in ("a100", "b200"):
        add("operators", plain, target, next(families["operators"].configs(plain, TARGETS[target])), target)
    # One worker: what one family leaves behind in the process must not reach the kernels of another.
    objects, errors = compile_kernels(specs, ObjectCache(tmp_path_factory.mktemp("objects")), jobs=1)
    assert errors == {}
    return objects, meant


def test_every_epilogue_compiles_in_both_operand_orders(compiled):
    objects, meant = compiled
    assert {what for what in meant.values() if isinstance(what, tuple)} == {
        (epilogue, swap_ab) for epilogue in EPILOGUES for swap_ab in (False, True)
    }
    assert objects.keys() == meant.keys()


def test_all_link_into_one_object_with_their_functions(compiled):
    objects, _ = compiled
    data = link(objects)
    assert {symbol_name(function_name(d)) for d in objects} <= set(elf.exports(data))


def test_each_kernel_is_for_its_own_arch(compiled):
    objects, meant = compiled
    arches = {"a100": 80, "b200": 100}
    for digest, data in objects.items():
        want = arches.get(meant[digest], 90) if isinstance(meant[digest], str) else 90
        assert {gpu_arch(image) for image in elf.gpu_images(link({digest: data}))} == {want}
