"""Real kernels of every arch: compiled, linked and loaded on a machine without a GPU."""

from __future__ import annotations

import struct

import pytest

from gemmcache.bundle import elf
from gemmcache.bundle.reader import BundleReader
from gemmcache.runtime.dispatch import bind_kernels
from gemmcache.runtime.native import load_module
from tests.integration.commands import needs_compiler

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.compile, needs_compiler]

ARCHES = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}


def gpu_arch(image: bytes) -> int:
    """The compute capability that a GPU image is for: the second byte of the ELF flags."""
    (flags,) = struct.unpack_from("<I", image, 48)
    return flags >> 8 & 0xFF


def part_of(reader: BundleReader, arch: str):
    (part,) = (p for p in reader.manifest.parts if p.target.arch == arch)
    return part


def loaded(reader: BundleReader, part):
    return load_module(part.blob.digest, lambda: reader.load_blob_memfd(part.blob), part.toolchain.cuda_major)


@pytest.mark.parametrize("arch", ARCHES)
def test_each_kernel_has_its_function_and_its_gpu_image(three_targets, arch):
    with BundleReader.open(three_targets["bundle"]) as reader:
        part = part_of(reader, arch)
        assert part.kernels
        data = reader.read_blob(part.blob)
    assert {k.symbol for k in part.kernels} <= set(elf.exports(data))
    images = elf.gpu_images(data)
    assert len(images) == len(part.kernels)
    assert {gpu_arch(image) for image in images} == {ARCHES[arch]}


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_load_and_refuse_tensors_that_are_not_on_a_device(three_targets, arch):
    with BundleReader.open(three_targets["bundle"]) as reader:
        part = part_of(reader, arch)
        module = loaded(reader, part)
    functions = bind_kernels(part, module.function)
    assert functions.keys() == {k.digest for k in part.kernels}
    a, b, out = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((16, 64), (128, 64), (16, 128)))
    for function, divisibility, align_bytes in functions.values():
        assert (divisibility, align_bytes) == (8, 16)
        with pytest.raises((ValueError, TypeError, RuntimeError), match="device"):
            function(a, b, out)
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            function(a, b)


def test_a_function_that_is_not_there_is_a_typed_error(three_targets):
    from gemmcache.errors import ToolError

    with BundleReader.open(three_targets["bundle"]) as reader:
        part = part_of(reader, "sm_90a")
        module = loaded(reader, part)
    with pytest.raises(ToolError, match="gc_nothing"):
        module.function("gc_nothing")
