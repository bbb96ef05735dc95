"""The compatibility policy, rule by rule and both ways."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.environment import Environment, Toolchain
from gemmcache.policy import RULES, Facts, Verdict, judge
from gemmcache.target import TARGETS, Host
from tests import strategies

OK, STALE, REFUSED = Verdict.OK, Verdict.STALE, Verdict.REFUSED
V2, V3 = Host("x86_64", "x86-64-v2"), Host("x86_64", "x86-64-v3")
ARM = Host("aarch64", "aarch64")
BASE = Facts("sm_90a", V2, "0.1.15", 132, "NVIDIA H200", "580.159.03", "13.0")

#: field, what the bundle was made for, what is found, verdict
CASES: list[tuple[str, Any, Any, Verdict]] = [
    ("arch", "sm_90a", "sm_90a", OK),
    ("arch", "sm_90a", "sm_90", REFUSED),
    ("arch", "sm_90", "sm_90a", REFUSED),
    ("arch", "sm_90a", "sm_100a", REFUSED),
    ("arch", "sm_100a", "sm_90a", REFUSED),
    ("arch", "sm_90a", None, REFUSED),
    ("host", V2, V2, OK),
    ("host", V2, V3, OK),
    ("host", V3, V2, REFUSED),
    ("host", V2, ARM, REFUSED),
    ("host", ARM, V2, REFUSED),
    ("host", ARM, ARM, OK),
    ("host", V2, replace(V2, libc="unknown"), REFUSED),
    ("host", V2, None, REFUSED),
    ("tvm_ffi", "0.1.15", "0.1.15", OK),
    ("tvm_ffi", "0.1.15", "0.1.15.post2", OK),
    ("tvm_ffi", "0.1.15", "0.1.9", OK),
    ("tvm_ffi", "0.1.15", "0.2.0", REFUSED),
    ("tvm_ffi", "0.2.0", "0.1.15", REFUSED),
    ("tvm_ffi", "0.1.15", "0.10.0", REFUSED),
    ("tvm_ffi", "0.1.15", "1.1.15", REFUSED),
    ("tvm_ffi", "0.1.15", None, STALE),
    ("sm_count", 132, 132, OK),
    ("sm_count", 132, 78, STALE),
    ("sm_count", 78, 132, STALE),
    ("sm_count", 132, None, STALE),
    ("product", "NVIDIA H200", "NVIDIA H200", OK),
    ("product", "NVIDIA H200", "NVIDIA H20", STALE),
    ("product", "NVIDIA H200", "NVIDIA H200 MIG 1g.18gb", STALE),
    ("product", None, "NVIDIA H200", STALE),
    ("driver", "580.159.03", "580.159.03", OK),
    ("driver", "580.159.03", "590.1", STALE),
    ("driver", "580.159.03", "570.1", STALE),
    ("driver", "580.159.03", None, STALE),
    ("driver", None, "580.159.03", STALE),
    ("driver", None, None, STALE),
    ("cuda_runtime", "13.0", "13.0", OK),
    ("cuda_runtime", "13.0", "13.1", STALE),
    ("cuda_runtime", "13.0", None, STALE),
]


@pytest.mark.parametrize(("field", "expected", "found", "verdict"), CASES)
def test_each_rule_both_ways(field, expected, found, verdict):
    judgement = judge(replace(BASE, **{field: expected}), replace(BASE, **{field: found}))
    assert judgement.verdict is verdict
    assert [d.field for d in judgement.differences] == ([] if verdict is OK else [field])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_a_value_that_either_side_does_not_know_is_never_ok(rule):
    unknown = replace(BASE, **{rule.field: None})
    for expected, found in ((unknown, BASE), (BASE, unknown), (unknown, unknown)):
        judgement = judge(expected, found)
        assert judgement.verdict is rule.unknown
        assert judgement.verdict is not OK
        assert "unknown" in str(judgement.differences[0])


def test_every_fact_has_a_rule_and_every_case_is_tried():
    assert {rule.field for rule in RULES} == {field.name for field in fields(Facts)} == {c[0] for c in CASES}
    for rule in RULES:
        assert {OK, rule.verdict, rule.unknown} <= {c[3] for c in CASES if c[0] == rule.field}


def test_the_worst_difference_decides_and_all_are_told():
    found = replace(BASE, driver="590.1", arch="sm_100a", sm_count=148)
    judgement = judge(BASE, found)
    assert judgement.verdict is REFUSED
    assert [d.field for d in judgement.differences] == ["arch", "sm_count", "driver"]
    assert [d.field for d in judgement.reasons(STALE)] == ["sm_count", "driver"]
    assert [d.field for d in judgement.reasons(REFUSED)] == ["arch"]
    assert judgement.reasons(OK) == ()


def test_reasons_are_readable_by_machines_and_by_people():
    judgement = judge(BASE, replace(BASE, driver=None, host=Host("x86_64", "x86-64")))
    value = json.loads(json.dumps(judgement.to_value()))
    assert value["verdict"] == "refused"
    host, driver = value["differences"]
    assert host == {
        "field": "host",
        "expected": "x86_64 x86-64-v2 gnu",
        "found": "x86_64 x86-64 gnu",
        "verdict": "refused",
        "remedy": host["remedy"],
    }
    assert (driver["expected"], driver["found"], driver["verdict"]) == ("580.159.03", None, "stale")
    assert all(d["remedy"] for d in value["differences"])
    assert str(judgement.differences[1]) == "driver: made for 580.159.03, found unknown"
    assert judge(BASE, BASE).to_value() == {"verdict": "ok", "differences": []}


def test_what_differs_is_visible():
    for field, expected, found, verdict in CASES:
        if verdict is not OK and None not in (expected, found):
            (difference,) = judge(replace(BASE, **{field: expected}), replace(BASE, **{field: found})).differences
            assert difference.expected != difference.found


def test_a_newer_dsl_or_kernel_source_is_ok_to_serve():
    """They matter to the one who builds; the compiled kernel is what it was."""

    def facts(toolchain: Toolchain) -> Facts:
        return Facts.of_environment(Environment(TARGETS["h200"], toolchain, "580.1", "13.0"), V2)

    old = Toolchain(dsl="4.8.1", cuda_major=13, tvm_ffi="0.1.15", kernel_sources=(("operators", "0"),))
    new = replace(old, dsl="4.9.0", kernel_sources=(("operators", "1"),))
    assert judge(facts(old), facts(new)).verdict is OK
    assert judge(facts(old), facts(replace(new, tvm_ffi="0.2.0"))).verdict is REFUSED


@given(strategies.environments(), strategies.hosts())
def test_facts_hold_all_that_an_environment_knows(environment, host):
    facts = Facts.of_environment(environment, host)
    assert facts == Facts(
        arch=environment.target.arch,
        host=host,
        tvm_ffi=environment.toolchain.tvm_ffi,
        sm_count=environment.target.sm_count,
        product=environment.target.product,
        driver=environment.driver,
        cuda_runtime=environment.cuda_runtime,
    )
    judgement = judge(facts, facts)
    assert {d.field for d in judgement.differences} == {
        rule.field for rule in RULES if getattr(facts, rule.field) is None
    }


@given(strategies.hosts(), strategies.hosts(), strategies.hosts())
def test_running_on_is_an_order(one, two, three):
    assert one.runs_on(one)
    if one.runs_on(two) and two.runs_on(three):
        assert one.runs_on(three)
    if one.runs_on(two) and two.runs_on(one):
        assert one == two


@given(st.lists(st.sampled_from(Verdict), max_size=5))
def test_verdicts_are_ordered_by_severity(verdicts):
    assert OK < STALE < REFUSED
    assert max(verdicts, default=OK) == max((int(v) for v in verdicts), default=0)
