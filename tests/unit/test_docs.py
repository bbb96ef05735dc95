"""The documents are true: tables equal what the code holds, names exist, and the examples run."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

from gemmcache import errors
from gemmcache.kernels.interface import Config, KernelFamily
from gemmcache.policy import RULES, Rule, Verdict
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import MeasurementPolicy
from gemmcache.target import TARGETS
from tests.conftest import ROOT
from tests.integration.commands import environment, gemmcache, needs_compiler, python
from tests.unit.test_imports import imports_of, package_of
from tools import generate_policy_table
from tools.check_readme import command_lines

DOCS = ROOT / "docs"
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
#: A fenced block that a line with nothing but a file's name goes before.
NAMED_BLOCK = re.compile(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


def table(name: str, head: str) -> list[list[str]]:
    """The cells of the rows of the one table whose first heading is `head`."""
    lines = text_of(name).splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def code(cell: str) -> list[str]:
    """The code spans of a cell."""
    return re.findall(r"`([^`]+)`", cell)


# docs/policy.md


def test_the_policy_table_is_what_the_rules_say():
    tool = ROOT / "tools" / "generate_policy_table.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(tool), "--check"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = table("policy.md", "Field | What it is, and when it is the same")
    assert [code(row[0]) for row in rows] == [[rule.field] for rule in RULES]
    assert [row[2:] for row in rows] == [[r.verdict.name.lower(), r.unknown.name.lower(), r.remedy] for r in RULES]


def test_a_stale_policy_table_is_told_and_written_anew(tmp_path, capsys):
    path = tmp_path / "policy.md"
    good = text_of("policy.md")
    path.write_text(good.replace("| `driver` | the", "| `driver` | not the"))
    assert generate_policy_table.main(["--check", str(path)]) == 1
    assert "stale" in capsys.readouterr().err
    assert path.read_text() != good
    assert generate_policy_table.main([str(path)]) == 0
    assert path.read_text() == good
    assert generate_policy_table.main(["--check", str(path)]) == 0


@pytest.mark.parametrize("marker", [generate_policy_table.BEGIN, generate_policy_table.END])
def test_a_policy_page_without_its_markers_is_left_alone(marker, tmp_path, capsys):
    path = tmp_path / "policy.md"
    text = text_of("policy.md").replace(marker, "")
    path.write_text(text)
    assert generate_policy_table.main([str(path)]) == 1
    assert "once each" in capsys.readouterr().err
    assert path.read_text() == text


def test_every_rule_changes_the_policy_table():
    tables = {generate_policy_table.table(RULES)}
    for i, rule in enumerate(RULES):
        other = replace(rule, verdict=Verdict.OK, remedy="something else")
        tables.add(generate_policy_table.table((*RULES[:i], other, *RULES[i + 1 :])))
    assert len(tables) == len(RULES) + 1
    with pytest.raises(ValueError, match="'colour' has no meaning"):
        generate_policy_table.table([Rule("colour", Verdict.OK, Verdict.OK, "")])


# docs/tuning.md


def test_every_field_of_the_measurement_policy_is_explained_with_its_default():
    rows = table("tuning.md", "Field of `MeasurementPolicy`")
    assert [(code(name)[0], int(default)) for name, default, _ in rows] == [
        (field.name, field.default) for field in fields(MeasurementPolicy)
    ]


def test_the_examples_of_the_ladder_are_right():
    from gemmcache.ladder import Ladder

    for bounds, m, served in table("tuning.md", "Ladder"):
        ladder = Ladder.of(map(int, bounds.split(",")))
        index, where = ladder.locate(int(m))
        if index is None:
            assert code(served) == [where]
        else:
            assert served == f"the entry of {ladder.bounds[index]}"


def test_the_numbers_of_the_protocol_are_those_of_the_code():
    pytest.importorskip("torch")
    bench, executor, search, samples = (
        importlib.import_module(f"gemmcache.tuning.{name}") for name in ("bench", "executor", "search", "samples")
    )
    text = " ".join(text_of("tuning.md").split())
    for said in (
        f"within a factor of {search._REACH} of the best",
        f"at most {bench._MAX_SETS} copies",
        f"at most {bench._MAX_LAUNCHES} launches",
        f"idles for {bench._HEAD_START_CYCLES} cycles",
        f"up to {bench._CHECK_ROWS} rows",
        f"more than {bench._LOCAL_STEPS} steps",
        f"silent for {executor._STEP_SECONDS:.0f} s",
        f"After {executor._MAX_LOSSES + 1} candidates",
    ):
        assert said in text, said
    assert (samples._OUTLIER, samples._RATE_MARGIN) == (3.0, 4.0)


def test_the_fields_of_a_record_are_explained():
    from gemmcache.records.interface import LIBRARY, TuningRecord
    from tests.fakes import ENVIRONMENT, POLICY

    record = TuningRecord(ProblemFamily.of(8, 8).at(1), ENVIRONMENT, POLICY, LIBRARY, (), "cublas", (1.0,), "now")
    named = {name for row in table("tuning.md", "Field of a record") for name in code(row[0])}
    assert named == set(record.to_value()) - {"format"}
    header, line = (json.loads(line) for line in text_of("tuning.md").splitlines() if line.startswith("{"))
    assert set(header) == {"format", "version", "environments", "policies"}
    assert set(line) == set(record.to_value())


# docs/serving.md


def test_every_counter_is_explained():
    from gemmcache.runtime.counters import Counters

    assert [code(name) for name, _ in table("serving.md", "Counter")] == [[name] for name in Counters().snapshot()]


def test_the_exceptions_are_what_they_are_said_to_be():
    rows = table("serving.md", "Error")
    for name, builtin, *_ in rows:
        kind = getattr(errors, code(name)[0])
        assert issubclass(kind, errors.GemmcacheError)
        assert issubclass(kind, getattr(builtins, code(builtin)[0]))
    assert len(rows) >= 9


def test_the_names_of_the_interface_of_serving_are_there():
    pytest.importorskip("torch")
    from gemmcache.runtime.linear import Linear
    from gemmcache.runtime.loader import Bundle, load

    text = text_of("serving.md")
    shown = re.search(r"`load\(path, (.*)\)` returns", text)
    assert shown
    parameters = inspect.signature(load).parameters.values()
    keywords = [f"{p.name}={json.dumps(p.default)}" for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert shown[1] == ", ".join(["*", *keywords]).replace("null", "None")
    shown = re.search(r"`linear\((.*)\)` computes", text)
    assert shown
    assert [part.partition("=")[0] for part in shown[1].split(", ")] == list(
        inspect.signature(Linear.__call__).parameters
    )[1:]
    source = inspect.getsource(Bundle)
    for row in table("serving.md", "`Bundle`"):
        for name in code(row[0]):
            member = name.partition("(")[0]
            assert hasattr(Bundle, member) or f"self.{member} = " in source


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.md")))
def test_python_in_the_documents_is_python(name):
    for block in PYTHON_BLOCK.findall(text_of(name)):
        compile(block, name, "exec")


def test_a_traced_call_is_torchs_own_in_one_graph_and_a_disabled_one_is_the_bundles():
    torch = pytest.importorskip("torch")
    from tests.unit.test_runtime_linear import K, N, counted, data, linear_of

    linear, counters, kernel = linear_of()
    served, x, w = linear.__call__, data(4, K), data(N, K)
    traced = torch.compile(lambda x, w: served(x, w), backend="eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(traced(x, w), torch.nn.functional.linear(x, w))
    assert (counted(counters), kernel.calls) == ({}, 0)
    apart = torch.compiler.disable(served)
    broken = torch.compile(lambda x, w: torch.relu(apart(x, w)), backend="eager")
    with torch.inference_mode():
        broken(x, w)
    assert (counted(counters), kernel.calls) == ({"kernel": 1}, 1)


# docs/architecture.md


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_tests_that_exist():
    rows = table("architecture.md", "Promise")
    assert len(rows) >= 10
    for _, held in rows:
        named = NAMED_TEST.findall(held)
        assert named
        assert held.count("tests/") == len(named)
        assert [f"{f}::{t}" for f, t in named if not (ROOT / f).is_file() or t not in functions(ROOT / f)] == []


def test_folders_import_what_the_architecture_says():
    package = ROOT / "gemmcache"
    folders = {p.parent.name for p in package.glob("*/__init__.py")}
    said = {code(row[0])[0].rstrip("/"): set(code(row[2])) for row in table("architecture.md", "Folder")}
    found: dict[str, set[str]] = {}
    for folder in folders:
        found[folder] = set()
        for path in sorted((package / folder).rglob("*.py")):
            names = imports_of(path.read_text(), package_of(path, ROOT))
            found[folder] |= {
                part
                for name in names
                if len(parts := name.split(".")) > 1
                for part in [parts[1]]
                if parts[0] == "gemmcache" and part in folders - {folder}
            }
    assert said == found


# docs/adding-a-kernel-family.md


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example's files in a folder of their own, which looks like one that pip installed them into."""
    folder = tmp_path / "naive"
    for name, body in NAMED_BLOCK.findall(text_of("adding-a-kernel-family.md")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    info = folder / "naive_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: naive-kernels\nVersion: 1.0\n")
    point = re.search(r'^\[project.entry-points."([\w.]+)"\]\n(.*)\n', (folder / "pyproject.toml").read_text(), re.M)
    assert point
    (info / "entry_points.txt").write_text(f"[{point[1]}]\n{point[2].replace(chr(34), '')}\n")
    return folder


@pytest.fixture
def naive(example: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelFamily]:
    """The example's family, imported from its files."""
    monkeypatch.syspath_prepend(str(example))
    module = importlib.import_module("naive_kernels")
    yield module.NaiveFamily()
    for name in [n for n in sys.modules if n.partition(".")[0] == "naive_kernels"]:
        del sys.modules[name]


FLOAT32 = ProblemFamily.of(1024, 1024, "float32")


def test_the_example_is_a_kernel_family(naive):
    assert isinstance(naive, KernelFamily)
    assert not inspect.isabstract(type(naive))
    assert re.fullmatch(r"[0-9a-f]{64}", naive.source_digest())
    documented = {code(row[0])[0] for row in table("adding-a-kernel-family.md", "Member")}
    assert documented == {"name", *KernelFamily.__abstractmethods__}
    for target in TARGETS.values():
        (config,) = naive.configs(FLOAT32, target)
        assert Config.from_value(config.to_value()) == config
        spec = naive.spec(config, FLOAT32, target)
        assert spec.serves(FLOAT32)
        assert spec == naive.spec(config, replace(FLOAT32, n=2048, k=512), target)
        small, large = (naive.estimate_us(config, FLOAT32.at(m), target) for m in (1, 8192))
        assert 0 < small < large


@pytest.mark.parametrize(
    "change",
    [
        {"a_dtype": "bfloat16"},
        {"acc_dtype": "float16"},
        {"batch": 2},
        {"b_layout": "kn"},
        {"n": 1020},
        {"k": 1001},
        {"epilogue": ProblemFamily.of(8, 8, epilogue="bias").epilogue},
    ],
)
def test_the_example_tells_what_it_does_not_compute(naive, change):
    family, target = replace(FLOAT32, **change), TARGETS["h200"]
    assert naive.unsupported(family, target)
    assert list(naive.configs(family, target)) == []
    (config,) = naive.configs(FLOAT32, target)
    with pytest.raises(errors.UnsupportedError):
        naive.spec(config, family, target)


@pytest.fixture
def installed(example, tmp_path) -> dict[str, str]:
    """An environment that has the example."""
    return environment(tmp_path / "cache", tmp_path / "records", example)


def test_the_example_is_found_without_importing_the_compiler(installed):
    statements = (
        "import sys\nfrom gemmcache.kernels.registry import kernel_families\n"
        "assert kernel_families()['naive'].name == 'naive'\nassert 'cutlass' not in sys.modules"
    )
    done = python(statements, env=installed)
    assert done.returncode == 0, done.stderr


@pytest.mark.compile
@needs_compiler
def test_the_example_compiles_and_its_command_lines_run(example, installed):
    script = [sys.executable, str(example / "check_kernels.py")]
    done = subprocess.run(script, env=installed, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+) naive\[threads=256\] [1-9]\d{3,} bytes$", done.stdout, re.M) == ["a100", "h200"]
    ran = []
    for _, words in command_lines(text_of("adding-a-kernel-family.md")):
        if words[0] in ("shapes", "build", "inspect", "verify"):
            done = gemmcache(*words, env=installed, cwd=example)
            assert done.returncode == 0, done.stderr
            ran.append(words[0])
    assert ran == ["shapes", "build", "inspect", "verify"]
    (part,) = json.loads(gemmcache("inspect", "naive-bundle", "--json", env=installed, cwd=example).stdout)["parts"]
    assert [kernel["config"] for kernel in part["kernels"]] == ["naive[threads=256]"]
    assert {entry["choice"] for entry in part["tables"][0]["entries"]} == {"kernel"}


@pytest.mark.gpu
@needs_compiler
def test_the_example_computes_the_right_numbers(example, installed, tmp_path):
    done = gemmcache("tune", "problems.json", "--family", "naive", "--json", env=installed, cwd=example)
    assert done.returncode == 0, done.stderr
    from gemmcache.records.layers import Records

    with Records.open(tmp_path / "records", shipped=False, read_only=True) as records:
        found = [layered.record for layered in records.all()]
    assert len(found) == 7
    assert {trial.status for record in found for trial in record.trials} == {"ok"}
