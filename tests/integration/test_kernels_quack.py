"""quack's kernels, compiled for real: epilogues, dtypes, arches and operand orders, beside another family."""

from __future__ import annotations

import pytest

from gemmcache.build.compile import compile_kernels
from gemmcache.build.link import link
from gemmcache.build.objects import ObjectCache
from gemmcache.bundle import elf
from gemmcache.bundle.interface import function_name, symbol_name
from gemmcache.kernels.identity import detect_toolchain, kernel_digest
from gemmcache.kernels.quack.family import installed
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


#: (dtype, epilogue, out dtype); each kind of operand and of step at least once.
HOPPER = (
    ("bf16", "none", None),
    ("bf16", "none", "fp32"),
    ("fp16", "bias+gelu_tanh", None),
    ("bf16", "relu", None),
    ("bf16", "bias+silu+residual", None),
    ("bf16", "gelu+residual*0.5", None),
    ("bf16", "scale_tensor+bias", None),
    ("bf16", "swiglu", None),
    ("bf16", "geglu", None),
    ("fp8", "scale_row_column", "bf16"),
    ("fp8", "scale_row_column+swiglu", "bf16"),
)
BLACKWELL = (
    ("bf16", "none", None),
    ("bf16", "bias+gelu_tanh+residual", None),
    ("bf16", "swiglu", None),
    ("fp8", "scale_row_column", "bf16"),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Objects by digest, and what each is for: (target, dtype, epilogue, out dtype, swapped operands)."""
    families = kernel_families()
    toolchain, host = detect_toolchain(families.values()), detect_host()
    specs, meant = {}, {}

    def add(family, target, dtype, epilogue, out, swap_ab):
        problem_family = ProblemFamily.of(4096, 4096, dtype, epilogue, out)
        configs = list(families[family].configs(problem_family, TARGETS[target]))
        wanted = [c for c in configs if c["swap_ab"] is swap_ab]
        if not wanted:
            assert problem_family.epilogue.gate
            return
        # Now a cooperative kernel, now a pingpong one.
        spec = families[family].spec(wanted[0 if swap_ab else -1], problem_family, TARGETS[target])
        digest = kernel_digest(spec, toolchain, host)
        specs[digest], meant[digest] = spec, (target, dtype, epilogue, out, swap_ab)

    for swap_ab in (False, True):
        for case in HOPPER:
            add("quack", "h200", *case, swap_ab)
        for target in ("b200", "rtx5090"):
            for case in BLACKWELL:
                add("quack", target, *case, swap_ab)
    for target in ("a100", "b200"):
        add("operators", target, "bf16", "none", None, False)
    # One worker: what one family leaves behind in the process must not reach the kernels of another.
    objects, errors = compile_kernels(specs, ObjectCache(tmp_path_factory.mktemp("objects")), jobs=1)
    assert errors == {}
    return objects, meant


def test_every_kind_of_epilogue_compiles_for_every_arch(compiled):
    objects, meant = compiled
    assert {what[0] for what in meant.values()} == {"a100", "h200", "b200", "rtx5090"}
    assert {what[1:4] for what in meant.values() if what[0] == "h200"} == set(HOPPER)
    assert objects.keys() == meant.keys()


def test_all_link_into_one_object_with_their_functions(compiled):
    objects, _ = compiled
    data = link(objects)
    assert {symbol_name(function_name(d)) for d in objects} <= set(elf.exports(data))


def test_each_kernel_is_for_its_own_arch(compiled):
    objects, meant = compiled
    arches = {"a100": 80, "h200": 90, "b200": 100, "rtx5090": 120}
    for digest, data in objects.items():
        assert {gpu_arch(image) for image in elf.gpu_images(link({digest: data}))} == {arches[meant[digest][0]]}
