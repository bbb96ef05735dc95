"""Hypothesis strategies for the values that records are made of."""

from __future__ import annotations

from datetime import datetime, timezone
from statistics import median

from hypothesis import strategies as st

from gemmcache import dtypes
from gemmcache.environment import Environment, Toolchain
from gemmcache.epilogue import ACTIVATIONS, GATES, SCALES, Epilogue
from gemmcache.kernels.interface import Config, KernelSpec
from gemmcache.problem import A_LAYOUTS, B_LAYOUTS, OUT_LAYOUTS, Problem, ProblemFamily
from gemmcache.records.interface import (
    FAILED,
    FLAGGED,
    KERNEL,
    LIBRARY,
    OK,
    PROTOCOL,
    WRONG,
    MeasurementPolicy,
    Trial,
    TuningRecord,
)
from gemmcache.target import TARGETS, Host, Target

#: Any text that UTF-8 can store, control characters included.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=10)
dims = st.one_of(st.integers(1, 64), st.integers(1, (1 << 31) - 1))
versions = st.one_of(st.none(), st.sampled_from(["580.159.03", "13.0", "2.13.0"]), texts)
#: Microseconds, with more digits than files keep.
microseconds = st.floats(1e-3, 1e6, allow_nan=False)


@st.composite
def epilogues(draw: st.DrawFn) -> Epilogue:
    residual = draw(st.booleans())
    step = draw(st.sampled_from(["", *ACTIVATIONS, *GATES]))
    return Epilogue(
        scale=draw(st.sampled_from([None, *SCALES])),
        bias=draw(st.booleans()),
        activation=step if step in ACTIVATIONS else None,
        gate=step if step in GATES else None,
        residual=residual,
        beta=draw(st.sampled_from(["1", "0.5", "-2", "0.125"])) if residual else "1",
    )


@st.composite
def families(draw: st.DrawFn) -> ProblemFamily:
    epilogue = draw(epilogues())
    kinds = st.sampled_from(sorted(dtypes.SIZES))
    n = draw(dims)
    return ProblemFamily(
        n=n + n % 2 if epilogue.gate and n < (1 << 31) - 1 else n - n % 2 if epilogue.gate else n,
        k=draw(dims),
        a_dtype=draw(kinds),
        b_dtype=draw(kinds),
        out_dtype=draw(kinds),
        acc_dtype=draw(kinds),
        batch=draw(st.integers(1, 64)),
        a_layout=draw(st.sampled_from(A_LAYOUTS)),
        b_layout=draw(st.sampled_from(B_LAYOUTS)),
        out_layout=draw(st.sampled_from(OUT_LAYOUTS)),
        epilogue=epilogue,
    )


def problems() -> st.SearchStrategy[Problem]:
    return st.builds(Problem, families(), dims)


def targets() -> st.SearchStrategy[Target]:
    return st.one_of(
        st.sampled_from(sorted(TARGETS.values(), key=str)),
        st.builds(
            Target,
            st.sampled_from(["sm_80", "sm_90a", "sm_100a", "sm_120a"]),
            st.integers(1, 4096),
            st.integers(0, 1 << 30),
            st.integers(0, 1 << 20),
            texts,
        ),
    )


def toolchains() -> st.SearchStrategy[Toolchain]:
    sources = st.dictionaries(names, st.text("0123456789abcdef", min_size=64, max_size=64), max_size=3)
    return st.builds(
        Toolchain,
        dsl=versions,
        cuda_major=st.one_of(st.none(), st.integers(1, 99)),
        tvm_ffi=versions,
        kernel_sources=sources.map(lambda d: tuple(sorted(d.items()))),
    )


def environments() -> st.SearchStrategy[Environment]:
    return st.builds(Environment, targets(), toolchains(), versions, versions, versions, versions)


def configs() -> st.SearchStrategy[Config]:
    values = st.one_of(
        st.booleans(),
        st.integers(-(1 << 31), 1 << 31),
        texts,
        st.lists(st.integers(0, 512), max_size=3).map(tuple),
    )
    params = st.dictionaries(names, values, max_size=4).map(lambda d: tuple(sorted(d.items())))
    return st.builds(Config, names, params)


def policies() -> st.SearchStrategy[MeasurementPolicy]:
    counts = st.integers(0, 1000)
    fields = dict.fromkeys(MeasurementPolicy.__dataclass_fields__, counts)
    return st.builds(MeasurementPolicy, **{**fields, "version": st.integers(1, PROTOCOL)})


def trials(statuses: tuple[str, ...] = (OK, WRONG, FAILED, FLAGGED)) -> st.SearchStrategy[Trial]:
    return st.builds(
        Trial,
        configs(),
        st.sampled_from(statuses),
        st.lists(microseconds, max_size=5).map(tuple),
        st.one_of(st.none(), st.floats(0, 1e3)),
        texts,
    )


#: UTC times in the form that records have.
times = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1), timezones=st.just(timezone.utc)).map(
    lambda t: t.strftime("%Y-%m-%dT%H:%M:%SZ")
)


@st.composite
def tuning_records(draw: st.DrawFn) -> TuningRecord:
    baseline = tuple(draw(st.lists(microseconds, min_size=1, max_size=5)))
    tried = draw(st.lists(trials(), max_size=3))
    first = tried[0] if tried else None
    wins = first is not None and first.status == OK and first.us < median(baseline)
    return TuningRecord(
        problem=draw(problems()),
        environment=draw(environments()),
        policy=draw(policies()),
        choice=draw(st.sampled_from([KERNEL, LIBRARY])) if wins else LIBRARY,
        trials=tuple(tried),
        baseline=draw(texts),
        baseline_us=baseline,
        measured_at=draw(times),
        conditions=tuple(
            sorted(draw(st.dictionaries(names, st.floats(-1e6, 1e6, allow_nan=False), max_size=3)).items())
        ),
    )


@st.composite
def kernel_specs(draw: st.DrawFn) -> KernelSpec:
    return KernelSpec.for_family(
        draw(configs()),
        draw(families()),
        arch=draw(st.sampled_from(["sm_90a", "sm_100a"])),
        sm_count=draw(st.one_of(st.none(), st.integers(1, 4096))),
        divisibility=draw(st.sampled_from([1, 8, 16])),
    )


def hosts() -> st.SearchStrategy[Host]:
    return st.builds(
        Host,
        st.sampled_from(["x86_64", "aarch64"]),
        st.sampled_from(["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"]),
        st.sampled_from(["gnu", "unknown"]),
    )


#: What the canonical encoder takes, floats left out.
canonical_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), texts, st.binary(max_size=40)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(texts, inner, max_size=5)),
    max_leaves=20,
)
