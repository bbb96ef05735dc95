"""Values that go into records and manifests: configs, kernel specs, trials, environments."""

from __future__ import annotations

import importlib.metadata
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemmcache import codec, environment
from gemmcache.bundle.interface import Entry
from gemmcache.environment import Environment, Toolchain, package_digest, package_version
from gemmcache.errors import IntegrityError, StorageError, UsageError
from gemmcache.kernels.interface import Config, KernelSpec
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import (
    KERNEL,
    LIBRARY,
    OK,
    UNBOUNDED_ERROR,
    MeasurementPolicy,
    Trial,
    TuningRecord,
)
from gemmcache.target import TARGETS

CONFIG = Config.of("operators", tile=(128, 64), swap=True, stages=3, mode="tma")
FAMILY = ProblemFamily.of(4096, 1024, "bf16", "bias")
SPEC = KernelSpec.for_family(CONFIG, FAMILY, "sm_90a", 132)


def record(**changes: object) -> TuningRecord:
    values = {
        "problem": FAMILY.at(16),
        "environment": Environment(TARGETS["h200"], Toolchain("4.8.1")),
        "policy": MeasurementPolicy(),
        "choice": KERNEL,
        "trials": (Trial(CONFIG, OK, (9.0, 8.0, 10.0), 0.002),),
        "baseline": "torch",
        "baseline_us": (12.0, 11.0),
        "measured_at": "2026-12-01T12:00:00Z",
    }
    return TuningRecord(**{**values, **changes})


def test_a_config_reads_like_a_map():
    assert CONFIG["tile"] == (128, 64)
    assert CONFIG.as_dict() == {"mode": "tma", "stages": 3, "swap": True, "tile": (128, 64)}
    assert str(CONFIG) == "operators[mode=tma stages=3 swap=true tile=128x64]"
    with pytest.raises(KeyError):
        CONFIG["nothing"]


def test_parameters_are_unique_and_sorted():
    with pytest.raises(UsageError, match="not unique and sorted"):
        Config("x", (("b", 1), ("a", 1)))
    with pytest.raises(UsageError, match="not unique and sorted"):
        Config("x", (("a", 1), ("a", 2)))


@pytest.mark.parametrize("bad", [1.5, None, b"x", {"a": 1}, ["a"], [True], [[1]]])
def test_a_parameter_is_a_number_a_flag_a_text_or_a_tuple_of_numbers(bad):
    with pytest.raises(IntegrityError, match="'tile'"):
        Config.from_value({"kernel_family": "x", "params": {"tile": bad}})


def test_a_spec_serves_the_families_it_was_made_for():
    assert SPEC.serves(FAMILY)
    assert SPEC.serves(replace(FAMILY, n=8, k=8))
    other = {
        "n": 4097,
        "k": 1028,
        "a_dtype": "float16",
        "b_dtype": "float16",
        "out_dtype": "float32",
        "acc_dtype": "int32",
        "a_layout": "km",
        "b_layout": "kn",
        "out_layout": "nm",
        "epilogue": ProblemFamily.of(8, 8).epilogue,
    }
    for name, value in other.items():
        assert not SPEC.serves(replace(FAMILY, **{name: value})), name


@pytest.mark.parametrize("error", [math.nan, math.inf, 1e12])
def test_an_error_beyond_all_bounds_can_be_recorded(error):
    trial = Trial(CONFIG, "wrong", error=error)
    assert trial.error == UNBOUNDED_ERROR
    stored = codec.decode(codec.encode(trial.to_value(), floats=True), floats=True)
    assert Trial.from_fields(codec.Fields(stored, "trial")) == trial


def test_integers_for_floats_change_no_bytes():
    assert Trial(CONFIG, OK, (2,), 0).to_value() == Trial(CONFIG, OK, (2.0,), 0.0).to_value()

    def stored(value: object) -> bytes:
        return codec.encode(value.to_value(), floats=True)

    assert stored(Trial(CONFIG, OK, (2,), 0)) == stored(Trial(CONFIG, OK, (2.0,), 0.0))
    assert stored(record(baseline_us=(12,), conditions=(("clock", 1980),))) == stored(
        record(baseline_us=(12.0,), conditions=(("clock", 1980.0),))
    )
    digest = "0" * 64
    whole = Entry(1, KERNEL, "tuned", digest, digest, 2, 3, 0)
    assert stored(whole) == stored(Entry(1, KERNEL, "tuned", digest, digest, 2.0, 3.0, 0.0))


def test_conditions_and_sources_have_one_order():
    assert record(conditions=(("b", 1.0), ("a", 2.0))) == record(conditions=(("a", 2.0), ("b", 1.0)))
    sources = (("operators", "1"), ("hopper", "2"))
    assert Toolchain(kernel_sources=sources) == Toolchain(kernel_sources=sources[::-1])


def test_a_record_tells_what_won():
    won = record()
    assert (won.winner, won.winner.us, won.library_us) == (won.trials[0], 9.0, 11.5)
    assert won.speedup == pytest.approx(11.5 / 9)
    lost = record(choice=LIBRARY)
    assert (lost.winner, lost.speedup) == (None, 1.0)
    assert Trial(CONFIG, "failed").us == math.inf
    # How it was measured is part of the name, what came out of it is not.
    assert won.digest == lost.digest
    assert won.digest != record(policy=MeasurementPolicy(seed=1)).digest
    assert TuningRecord.from_value(won.to_value()) == won


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": ()}, "did not beat the library"),
        ({"trials": (Trial(CONFIG, "wrong", (9.0,)),)}, "did not beat the library"),
        ({"baseline_us": (9.0,)}, "did not beat the library"),
        ({"baseline_us": ()}, "'baseline_us' is empty"),
        ({"baseline_us": (0.0,)}, "positive finite"),
        ({"baseline_us": (-1.0,)}, "positive finite"),
        ({"baseline_us": (math.nan,)}, "positive finite"),
        ({"baseline_us": (math.inf,)}, "positive finite"),
        ({"choice": "best"}, "not one of kernel, library"),
    ],
)
def test_records_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(IntegrityError, match=message):
        TuningRecord.from_value(record(**changes).to_value())


def test_package_versions_and_digests(tmp_path, monkeypatch):
    assert package_version("msgpack") == importlib.metadata.version("msgpack")
    assert package_version("no-such-package-at-all") is None
    assert package_digest("no-such-package-at-all", "x/") is None

    def digest_of(**sources: str) -> str | None:
        files = []
        for name, text in sources.items():
            path = tmp_path / name
            path.write_text(text)
            files.append(_Listed(f"pkg/kernels/{name}.py", path))
        monkeypatch.setattr(environment.metadata, "files", lambda name: files)
        package_digest.cache_clear()
        return package_digest("pkg", "kernels/")

    one = digest_of(a="1", b="2")
    assert codec.is_digest(one)
    assert digest_of(b="2", a="1") == one
    assert len({one, digest_of(a="1"), digest_of(a="1", b="3"), digest_of(a="12", b=""), digest_of(a="2", b="1")}) == 5
    # A package that lists no sources tells nothing about them.
    assert digest_of() is None
    digest_of(a="1")
    (tmp_path / "a").unlink()
    package_digest.cache_clear()
    with pytest.raises(StorageError, match="can't be read") as caught:
        package_digest("pkg", "kernels/")
    assert caught.value.remedy == "reinstall pkg"
    package_digest.cache_clear()


class _Listed:
    """A file as the metadata of a package lists it."""

    suffix = ".py"

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path

    def locate(self) -> Path:
        return self._path

    def __str__(self) -> str:
        return self._name


def test_the_driver_is_unknown_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert environment.driver_version() is None


@pytest.mark.parametrize("version", ["580.159.03", b"580.159.03"])
def test_the_driver_through_nvml(monkeypatch, version):
    calls = []
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlSystemGetDriverVersion=lambda: version,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert environment.driver_version() == "580.159.03"
    assert calls == ["init", "shutdown"]

    def broken() -> None:
        raise RuntimeError("driver not loaded")

    nvml.nvmlInit = broken
    assert environment.driver_version() is None
