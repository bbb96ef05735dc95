"""The manifest: it comes back as it is, and every rule of the format is enforced when it is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from gemmcache import codec
from gemmcache.bundle.interface import MAX_MANIFEST_BYTES, Manifest
from gemmcache.errors import IncompatibleError, IntegrityError
from tests.strategies_bundle import bundle, manifests


def value() -> Any:
    return bundle(real=False)[0].to_value()


def decode(changed: Any) -> Manifest:
    return Manifest.decode(codec.encode(changed, floats=True))


@given(manifests())
def test_a_manifest_comes_back_as_it_is(manifest: Manifest) -> None:
    data = manifest.encode()
    assert Manifest.decode(data) == manifest
    assert Manifest.decode(data).encode() == data


def test_unknown_fields_of_a_newer_minor_version_are_ignored() -> None:
    changed = value()
    changed["minor"] = 7
    for place in (
        changed,
        changed["parts"][0],
        changed["parts"][0]["blob"],
        changed["parts"][0]["tables"][0],
    ):
        place["from_the_future"] = [1, {"x": 2.5}]
    changed["parts"][0]["tables"][0]["entries"][0]["from_the_future"] = True
    assert decode(changed) == bundle(real=False)[0]


@pytest.mark.parametrize("major", [0, 2, 99])
def test_another_major_version_is_refused(major: int) -> None:
    with pytest.raises(IncompatibleError, match="format version") as caught:
        decode({**value(), "major": major, "parts": "of another shape"})
    assert caught.value.remedy


def _entry(changed: Any, index: int = 1) -> Any:
    tables = changed["parts"][0]["tables"]
    return next(t for t in tables if len(t["entries"]) == 3)["entries"][index]


def _set(place: Any, name: str, new: Any) -> None:
    place[name] = new


BREAKAGES: dict[str, Any] = {
    "format": lambda v: _set(v, "format", "zip"),
    "no parts": lambda v: _set(v, "parts", []),
    "same part twice": lambda v: v["parts"].append(v["parts"][0]),
    "version 0": lambda v: _set(v, "version", 0),
    "version too large": lambda v: _set(v, "version", 1 << 53),
    "a flag for a number": lambda v: _set(v, "version", True),
    "name is bytes": lambda v: _set(v, "name", b"x"),
    "missing field": lambda v: v["parts"][0].pop("host"),
    "missing driver": lambda v: v["parts"][0].pop("driver"),
    "missing runtime": lambda v: v["parts"][0].pop("cuda_runtime"),
    "missing kernel": lambda v: _entry(v, 0).pop("kernel"),
    "missing time": lambda v: _entry(v, 0).pop("us"),
    "unknown field in a target": lambda v: _set(v["parts"][0]["target"], "x", 1),
    "unknown field in a host": lambda v: _set(v["parts"][0]["host"], "x", 1),
    "unknown field in a toolchain": lambda v: _set(v["parts"][0]["toolchain"], "x", 1),
    "unknown field in a spec": lambda v: _set(v["parts"][0]["kernels"][0]["spec"], "x", 1),
    "unknown field in a family": lambda v: _set(v["parts"][0]["tables"][0]["family"], "x", 1),
    "no blob": lambda v: _set(v["parts"][0], "blob", None),
    "size 0": lambda v: _set(v["parts"][0]["blob"], "size", 0),
    "size too large": lambda v: _set(v["parts"][0]["blob"], "size", (1 << 30) + 1),
    "two sizes of one blob": lambda v: _set(v["parts"][1], "blob", {**v["parts"][0]["blob"], "size": 5}),
    "a path for a digest": lambda v: _set(v["parts"][0]["blob"], "digest", "../../etc/passwd"),
    "an absolute path": lambda v: _set(v["parts"][0]["blob"], "digest", "/etc/passwd"),
    "capital hex": lambda v: _set(v["parts"][0]["blob"], "digest", "AB" * 32),
    "kernels out of order": lambda v: v["parts"][0]["kernels"].reverse(),
    "kernel twice": lambda v: v["parts"][0]["kernels"].append(v["parts"][0]["kernels"][-1]),
    "kernel missing": lambda v: v["parts"][0]["kernels"].pop(),
    "kernel of another arch": lambda v: _set(v["parts"][0]["kernels"][0]["spec"], "arch", "sm_80"),
    "kernel of another SM count": lambda v: _set(v["parts"][0]["kernels"][0]["spec"], "sm_count", 78),
    "kernel of another dtype": lambda v: _set(v["parts"][0]["kernels"][0]["spec"], "a_dtype", "float16"),
    "kernel of another epilogue": lambda v: _set(v["parts"][0]["kernels"][0]["spec"], "epilogue", "relu"),
    "tables out of order": lambda v: v["parts"][0]["tables"].reverse(),
    "table twice": lambda v: v["parts"][0]["tables"].append(v["parts"][0]["tables"][-1]),
    "no entries": lambda v: _set(v["parts"][0]["tables"][0], "entries", []),
    "entries out of order": lambda v: v["parts"][0]["tables"][0]["entries"].reverse(),
    "m of 0": lambda v: _set(_entry(v, 0), "m", 0),
    "m too large": lambda v: _set(_entry(v, 2), "m", 1 << 31),
    "unknown choice": lambda v: _set(_entry(v), "choice", "magic"),
    "library with a kernel": lambda v: _set(_entry(v), "choice", "library"),
    "kernel without one": lambda v: _set(_entry(v), "kernel", None),
    "predicted with a record": lambda v: _set(_entry(v), "origin", "predicted"),
    "tuned without one": lambda v: _set(_entry(v), "record", None),
    "no time": lambda v: _set(_entry(v), "us", 0.0),
    "negative time": lambda v: _set(_entry(v), "library_us", -1.0),
    "integer time": lambda v: _set(_entry(v), "us", 12),
    "negative zero": lambda v: _set(_entry(v), "error", -0.0),
    "epilogue in another order": lambda v: _set(v["parts"][0]["tables"][0]["family"], "epilogue", "relu+bias"),
    "unknown dtype": lambda v: _set(v["parts"][0]["tables"][0]["family"], "a_dtype", "float64"),
    "count of 0": lambda v: _set(v["parts"][0]["tables"][0], "count", 0),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_rule_is_an_integrity_error(name: str) -> None:
    changed = value()
    BREAKAGES[name](changed)
    with pytest.raises(IntegrityError):
        decode(changed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_are_finite(bad: float) -> None:
    import msgpack

    changed = value()
    _entry(changed)["us"] = bad
    with pytest.raises(IntegrityError, match="canonical"):
        Manifest.decode(msgpack.packb(_sorted(changed)))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _sorted(value[k]) for k in sorted(value)}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


def test_two_kernels_must_not_share_a_function_name() -> None:
    manifest = bundle(real=False)[0]
    part = manifest.parts[0]
    a, b = part.kernels
    twin = a.digest[:32] + ("0" * 32 if a.digest[32:] != "0" * 32 else "1" * 32)
    kernels = tuple(sorted((a, replace(b, digest=twin)), key=lambda k: k.digest))
    tables = tuple(
        replace(t, entries=tuple(replace(e, kernel=twin if e.kernel == b.digest else e.kernel) for e in t.entries))
        for t in part.tables
    )
    with pytest.raises(IntegrityError, match="function name"):
        Manifest.decode(replace(manifest, parts=(replace(part, kernels=kernels, tables=tables),)).encode())


def test_an_integral_time_has_the_bytes_of_a_float() -> None:
    manifest = bundle(real=False)[0]
    part = manifest.parts[0]
    table = part.tables[0]
    entries = {kind: tuple(replace(e, us=kind(20), error=kind(0)) for e in table.entries) for kind in (int, float)}
    made = [
        replace(manifest, parts=(replace(part, tables=(replace(table, entries=e), *part.tables[1:])),)).encode()
        for e in entries.values()
    ]
    assert made[0] == made[1]
    Manifest.decode(made[0])


def test_a_manifest_is_bounded() -> None:
    with pytest.raises(IntegrityError, match="bytes"):
        Manifest.decode(bytes(MAX_MANIFEST_BYTES + 1))
