"""A second reader of bundles, written from docs/bundle-format.md alone: it shares no code with the package."""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from typing import Any

import msgpack

DIGEST = re.compile(r"[0-9a-f]{64}")
TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}|\.nfs[0-9a-f]{8,32}")
FAMILY = [
    "a_dtype",
    "a_layout",
    "acc_dtype",
    "b_dtype",
    "b_layout",
    "batch",
    "epilogue",
    "k",
    "n",
    "out_dtype",
    "out_layout",
]
SPEC = [
    "a_dtype",
    "a_layout",
    "acc_dtype",
    "align_bytes",
    "arch",
    "b_dtype",
    "b_layout",
    "config",
    "divisibility",
    "epilogue",
    "out_dtype",
    "out_layout",
    "sm_count",
]
SHARED = ["a_dtype", "a_layout", "acc_dtype", "b_dtype", "b_layout", "epilogue", "out_dtype", "out_layout"]


class Refused(Exception):
    """The bundle breaks a rule of the format."""


def must(condition: bool, rule: str) -> None:
    if not condition:
        raise Refused(rule)


def ordered(value: Any) -> Any:
    if isinstance(value, dict):
        must(all(isinstance(k, str) for k in value), "keys are strings")
        return {k: ordered(value[k]) for k in sorted(value)}
    return [ordered(v) for v in value] if isinstance(value, list) else value


def canonical(value: Any) -> bytes:
    return msgpack.packb(ordered(value))


def h(kind: str, value: Any) -> str:
    return hashlib.sha256(canonical([kind, value])).hexdigest()


def integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def number(value: Any, zero: bool) -> bool:
    if value is None:
        return True
    if type(value) is not float or not math.isfinite(value):
        return False
    return value > 0 or (zero and value == 0 and math.copysign(1, value) > 0)


def regular(path: str) -> bytes:
    must(stat.S_ISREG(os.lstat(path).st_mode), f"{path} is a regular file")
    with open(path, "rb") as file:
        return file.read()


class Bundle:
    """`digest`, `manifest` (plain maps and lists) and `blobs` (bytes by digest) of a bundle, all checked."""

    def __init__(self, folder: str) -> None:
        for name in os.listdir(folder):
            must(name in ("manifest.msgpack", "blobs") or bool(TEMPORARY.fullmatch(name)), f"no file {name}")
        data = regular(os.path.join(folder, "manifest.msgpack"))
        must(len(data) <= 16777216, "the manifest is small enough")
        self.digest = hashlib.sha256(data).hexdigest()
        try:
            self.manifest = msgpack.unpackb(data, raw=False)
            same = canonical(self.manifest) == data
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise Refused(f"the manifest is msgpack: {error}") from error
        must(same, "the manifest is canonical")
        self.check_manifest()
        self.blobs: dict[str, bytes] = {}
        folder = os.path.join(folder, "blobs")
        for name in os.listdir(folder) if os.path.lexists(folder) else ():
            must(is_digest(name) or bool(TEMPORARY.fullmatch(name)), f"no blob {name}")
        for part in self.manifest["parts"]:
            if part["blob"] is not None:
                blob = regular(os.path.join(folder, part["blob"]["digest"]))
                must(len(blob) == part["blob"]["size"], "the blob has its size")
                must(hashlib.sha256(blob).hexdigest() == part["blob"]["digest"], "the blob has its digest")
                self.blobs[part["blob"]["digest"]] = blob

    def check_manifest(self) -> None:
        m = self.manifest
        must(isinstance(m, dict) and m.get("format") == "gemmcache-bundle", "format")
        must(m["major"] == 1 and integer(m["minor"], 0, 2**64 - 1), "major and minor")
        must(integer(m["version"], 1, 2**53 - 1), "version")
        must(isinstance(m["name"], str) and isinstance(m["generator"], str), "name and generator")
        must(1 <= len(m["parts"]) <= 64, "parts")
        keys = [canonical([p["target"], p["host"]]) for p in m["parts"]]
        must(len(set(keys)) == len(keys), "one part a target and host")
        for part in m["parts"]:
            self.check_part(part)

    def check_part(self, part: dict[str, Any]) -> None:
        must(sorted(part["target"]) == ["arch", "l2_bytes", "product", "sm_count", "smem_bytes"], "target")
        must(re.fullmatch(r"sm_[1-9][0-9]{1,2}[af]?", part["target"]["arch"]) is not None, "arch")
        must(sorted(part["host"]) == ["arch", "isa", "libc"], "host")
        tools = part["toolchain"]
        must(sorted(tools) == ["cuda_major", "dsl", "kernel_sources", "tvm_ffi"], "toolchain")
        kernels = {}
        for kernel in part["kernels"]:
            spec = kernel["spec"]
            must(sorted(spec) == SPEC and sorted(spec["config"]) == ["kernel_family", "params"], "spec")
            source = tools["kernel_sources"].get(spec["config"]["kernel_family"])
            value = [spec, tools["dsl"], tools["cuda_major"], tools["tvm_ffi"], source, part["host"]]
            must(kernel["digest"] == h("kernel", value), "kernel digest")
            must(spec["arch"] == part["target"]["arch"], "the kernel's arch")
            must(spec["sm_count"] in (None, part["target"]["sm_count"]), "the kernel's SM count")
            kernels[kernel["digest"]] = spec
        digests = [k["digest"] for k in part["kernels"]]
        must(digests == sorted(kernels), "kernels in order")
        must(len({d[:32] for d in digests}) == len(digests), "functions differ")
        must((part["blob"] is None) == (not digests), "a blob exactly for kernels")
        families = [h("problem-family", t["family"]) for t in part["tables"]]
        must(families == sorted(set(families)), "tables in order")
        used = set()
        for table in part["tables"]:
            used |= self.check_table(table, kernels)
        must(used == set(digests), "kernels listed are kernels named")

    def check_table(self, table: dict[str, Any], kernels: dict[str, Any]) -> set[str]:
        family = table["family"]
        must(sorted(family) == FAMILY and integer(table["count"], 1, 2**31), "family")
        must(all(integer(family[x], 1, 2**31 - 1) for x in ("n", "k", "batch")), "sizes")
        ms = [e["m"] for e in table["entries"]]
        must(1 <= len(ms) <= 4096 and all(integer(m, 1, 2**31 - 1) for m in ms), "entries")
        must(ms == sorted(set(ms)), "entries in order")
        used = set()
        for e in table["entries"]:
            must(e["choice"] in ("kernel", "library") and e["origin"] in ("tuned", "predicted"), "words")
            must((e["choice"] == "kernel") == is_digest(e["kernel"]), "a kernel exactly if it is chosen")
            must((e["origin"] == "tuned") == is_digest(e["record"]), "a record exactly if it was tuned")
            must(
                number(e["us"], False) and number(e["library_us"], False) and number(e["error"], True),
                "numbers",
            )
            if e["kernel"] is not None:
                spec = kernels.get(e["kernel"])
                must(
                    spec is not None and all(spec[x] == family[x] for x in SHARED),
                    "the kernel fits the family",
                )
                must(not any(family[x] % spec["divisibility"] for x in ("n", "k")), "n and k divide")
                used.add(e["kernel"])
        return used

    def entry(self, table: dict[str, Any], m: int) -> dict[str, Any] | None:
        """The entry that serves m, None for the library."""
        before = 0
        for e in table["entries"]:
            if max(before, e["m"] // 2, e["m"] - 16) < m <= e["m"]:
                return e
            before = e["m"]
        return None

    @staticmethod
    def symbol(kernel: dict[str, Any]) -> str:
        return "__tvm_ffi_gc_" + kernel["digest"][:32]
