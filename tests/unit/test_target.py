"""Targets by name and as found, and the host's instruction set level."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest

from gemmcache import codec
from gemmcache.errors import DeviceError, IntegrityError, UsageError
from gemmcache.target import (
    TARGETS,
    Host,
    Target,
    arch_of,
    detect_host,
    detect_target,
    named_target,
    product_of,
)


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H200 NVL", "NVIDIA H200"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("NVIDIA H20-3e", "NVIDIA H20"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA H100 PCIe", "NVIDIA H100"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100"),
        ("NVIDIA B200", "NVIDIA B200"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 480GB"),
        ("NVIDIA H2000", "NVIDIA H2000"),
        ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 MIG 1g.18gb"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090"),
        ("NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 5090 D"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA GeForce RTX 5090 Laptop GPU"),
        ("", ""),
    ],
)
def test_product_of(name, product):
    assert product_of(name) == product


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
    ],
)
def test_arch_of_and_back(capability, arch):
    assert arch_of(capability) == arch
    assert Target(arch, 1, 0, 0, "x").capability == capability


def test_named_targets():
    assert named_target("H200") is TARGETS["h200"]
    assert str(named_target("h200")) == "NVIDIA H200 (sm_90a, 132 SMs)"
    with pytest.raises(UsageError, match="'h2000' is not known") as caught:
        named_target("h2000")
    assert "h200" in caught.value.remedy
    for target in TARGETS.values():
        assert product_of(target.product) == target.product
        assert arch_of(target.capability) == target.arch


@pytest.mark.parametrize("arch", ["", "90a", "sm_9", "sm_90b", "sm_90aa", "sm_90a\n", "SM_90a", "sm_1000", "sm_xx"])
def test_an_arch_is_an_arch(arch):
    with pytest.raises(UsageError, match="arch"):
        Target(arch, 132, 0, 0, "x")
    value = {**TARGETS["h200"].to_value(), "arch": arch}
    with pytest.raises(IntegrityError, match="arch"):
        Target.from_fields(codec.Fields(value, "target"))


def test_detect_target_reads_the_device(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=62914560,
        shared_memory_per_block_optin=232448,
        name="NVIDIA H200",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert detect_target(1) == TARGETS["h200"]
    for device in (-1, 2):
        with pytest.raises(DeviceError, match=f"device {device} is not there"):
            detect_target(device)


def test_detect_target_without_a_device(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA device"):
        detect_target()


V2 = "fpu sse sse2 pni cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = V2 + " avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("fpu sse sse2", "x86-64"),
        (V2, "x86-64-v2"),
        (V2.replace(" ssse3", ""), "x86-64"),
        (V3, "x86-64-v3"),
        (V3.replace(" fma", ""), "x86-64-v2"),
        (V4, "x86-64-v4"),
        (V4.replace(" avx512vl", ""), "x86-64-v3"),
        # A level counts only with all below it.
        (V4.replace(" avx2", ""), "x86-64-v2"),
        ("", "x86-64"),
    ],
)
def test_detect_host_reads_the_level_off_the_flags(monkeypatch, flags, isa):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    cpuinfo = f"processor\t: 0\nvmx flags\t: avx512f\nflags\t\t: {flags}\nbugs\t: x\n\nprocessor\t: 1\n"
    assert detect_host(cpuinfo) == Host("x86_64", isa, "gnu")


def test_detect_host_without_flags(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert detect_host("").isa == "x86-64"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert detect_host(f"flags : {V4}") == Host("aarch64", "aarch64", "unknown")


def test_detect_host_on_this_machine():
    host = detect_host()
    assert host.arch == platform.machine()
    assert host.runs_on(host)
