"""Keys are complete: every field of every value that is part of a key changes its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gemmcache import codec
from gemmcache.environment import Environment, Toolchain
from gemmcache.epilogue import Epilogue
from gemmcache.kernels.interface import Config, KernelSpec
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.records.interface import slot_digest
from gemmcache.target import TARGETS, Host, Target
from tests import strategies

#: Other values for fields where not every value of the type is allowed.
OTHERS: dict[str, tuple[Any, ...]] = {
    "arch": ("sm_90", "sm_90a", "sm_100a"),
    "a_dtype": ("bfloat16", "float16"),
    "b_dtype": ("bfloat16", "float16"),
    "out_dtype": ("bfloat16", "float16", "float32"),
    "acc_dtype": ("float32", "int32"),
    "a_layout": ("mk", "km"),
    "b_layout": ("nk", "kn"),
    "out_layout": ("mn", "nm"),
    "isa": ("x86-64-v2", "x86-64-v3"),
    "beta": ("1", "0.5"),
    "scale": (None, "tensor", "row", "column", "row_column"),
    "activation": (None, "relu", "gelu", "gelu_tanh", "silu"),
    "gate": (None, "swiglu", "geglu"),
    "kernel_sources": ((), (("x", "1"),), (("x", "2"),), (("y", "1"),)),
    "params": ((), (("x", 1),), (("x", 2),), (("y", 1),), (("x", "1"),), (("x", (1,)),)),
}


def perturbed(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that differs from `value` in one field, at any depth, with the field's path."""
    for field in fields(value):
        current = getattr(value, field.name)
        where = f"{path}.{field.name}" if path else field.name
        if is_dataclass(current):
            changes = perturbed(current, where)
        elif field.name in OTHERS:
            changes = ((where, other) for other in OTHERS[field.name] if other != current)
        elif isinstance(current, bool):
            changes = iter([(where, not current)])
        elif isinstance(current, int):
            changes = iter([(where, current + 2 if current < 4000 else current - 2)])
        elif current is None:
            changes = iter([(where, 1 if field.name in ("sm_count", "cuda_major") else "1")])
        else:
            changes = iter([(where, f"{current}x")])
        for name, other in changes:
            if isinstance(value, Epilogue):
                try:
                    yield name, replace(value, **{field.name: other})
                except ValueError:
                    # An activation beside a gate, or beta without a residual: no such value to tell apart.
                    continue
            else:
                yield name, replace(value, **{field.name: other})


def family_of(epilogue: str) -> ProblemFamily:
    return ProblemFamily.of(4096, 1024, "bf16", epilogue)


def spec() -> KernelSpec:
    return KernelSpec.for_family(Config.of("operators", tile=(128, 256), cluster=2), family_of("bias"), "sm_90a", 132)


def environment() -> Environment:
    return Environment(
        TARGETS["h200"], Toolchain("4.8.1", 13, "0.1.15", (("operators", "0"),)), "580.1", "13.0", "2.13", "13.1"
    )


def of_value(kind: str) -> Callable[[Any], str]:
    return lambda value: codec.digest(kind, value.to_value())


CASES: list[tuple[Any, Callable[[Any], str]]] = [
    (family_of("none"), lambda v: v.digest),
    (family_of("bias+gelu+residual*0.5"), lambda v: v.digest),
    (family_of("scale_row+swiglu"), lambda v: v.digest),
    (family_of("gelu_tanh").at(16), lambda v: v.digest),
    (Config.of("operators", tile=(128, 256), cluster=2, swap=True), lambda v: v.digest),
    (spec(), of_value("kernel-spec")),
    (TARGETS["h200"], of_value("target")),
    (Host("x86_64", "x86-64-v2"), of_value("host")),
    (environment(), lambda v: v.digest),
]


@pytest.mark.parametrize(("value", "digest"), CASES, ids=lambda v: type(v).__name__)
def test_every_field_changes_the_digest(value, digest):
    seen = {digest(value): "the value itself"}
    paths = set()
    for path, other in perturbed(value):
        key = digest(other)
        assert key not in seen, f"{path} and {seen[key]} share a digest"
        seen[key] = path
        paths.add(path.partition(".")[0])
    assert paths == {field.name for field in fields(value)}


@pytest.mark.parametrize("field", ["arch", "sm_count", "product"])
def test_products_of_one_chip_have_their_own_record_slots(field):
    problem = family_of("none").at(64)
    h200 = TARGETS["h200"]
    other = replace(h200, **{field: {"arch": "sm_90", "sm_count": 78, "product": "NVIDIA H20"}[field]})
    assert slot_digest(problem, h200) != slot_digest(problem, other)


def test_slots_of_the_named_targets_differ():
    problem = family_of("none").at(64)
    assert len({slot_digest(problem, target) for target in TARGETS.values()}) == len(TARGETS)


def test_a_target_has_one_slot_whatever_the_driver():
    before, after = environment(), replace(environment(), driver="590.1")
    assert before.digest != after.digest
    problem = family_of("none").at(64)
    assert slot_digest(problem, before.target) == slot_digest(problem, after.target)


@given(strategies.problems(), strategies.problems())
def test_problems_are_equal_exactly_if_their_digests_are(one, other):
    assert (one == other) == (one.digest == other.digest)


@given(strategies.families())
def test_kinds_of_digests_are_apart(family):
    assert family.digest != codec.digest("config", family.to_value())
    assert family.at(1).digest != family.digest


@given(st.data())
def test_a_digest_does_not_depend_on_the_order_of_maps(data):
    value = data.draw(st.dictionaries(strategies.texts, strategies.canonical_values, min_size=2, max_size=5))
    names = data.draw(st.permutations(list(value)))
    assert codec.digest("x", {name: value[name] for name in names}) == codec.digest("x", value)


ROUND_TRIPS = {
    ProblemFamily: strategies.families(),
    Problem: strategies.problems(),
    Config: strategies.configs(),
    KernelSpec: strategies.kernel_specs(),
    Target: strategies.targets(),
    Host: strategies.hosts(),
    Environment: strategies.environments(),
}


@pytest.mark.parametrize("kind", ROUND_TRIPS, ids=lambda k: k.__name__)
@given(data=st.data())
def test_encode_and_decode_give_the_value_back(kind, data):
    value = data.draw(ROUND_TRIPS[kind])
    stored = codec.encode(value.to_value())
    again = kind.from_fields(codec.Fields(codec.decode(stored), "value"))
    assert again == value
    assert codec.encode(again.to_value()) == stored


@pytest.mark.parametrize("kind", ROUND_TRIPS, ids=lambda k: k.__name__)
@given(data=st.data())
def test_a_key_with_a_field_too_many_or_too_few_is_refused(kind, data):
    value = data.draw(ROUND_TRIPS[kind]).to_value()
    name = data.draw(st.sampled_from(sorted(value)))
    with pytest.raises(ValueError, match="not known here"):
        kind.from_fields(codec.Fields({**value, "new": 1}, "value"))
    # Of an environment, what is not there is unknown; of all others, nothing may be missing.
    assume(value[name] is not None and not (kind is Environment and isinstance(value[name], str)))
    less = {k: v for k, v in value.items() if k != name}
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        kind.from_fields(codec.Fields(less, "value"))
