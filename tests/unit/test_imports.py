"""What imports what: a light package, and serving that never meets the compiler, the tuner or their stores."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "numpy",
    "cutlass",
    "cutlass_operators",
    "diskcache",
    "click",
    "rich",
    "yaml",
    "transformers",
    "tvm_ffi",
    "pynvml",
    "sqlite3",
    "msgpack",
)
#: What a process that serves, inspects or verifies a bundle may never import, not even inside a function.
NOT_IN_SERVING = (
    "cutlass",
    "cutlass_operators",
    "quack",
    "diskcache",
    "sqlite3",
    "click",
    "rich",
    "yaml",
    "transformers",
    "pickle",
    "gemmcache.tuning",
    "gemmcache.build",
    "gemmcache.records.store",
    "gemmcache.records.disk",
    "gemmcache.cli",
    "gemmcache.kernels.registry",
    "gemmcache.kernels.operators",
    "gemmcache.kernels.compiler",
)
SERVING = ("runtime", "bundle")
#: Modules that everything else imports: they stay free of all but the standard library and msgpack.
CORE = (
    "errors",
    "codec",
    "dtypes",
    "epilogue",
    "problem",
    "ladder",
    "target",
    "environment",
    "policy",
    "kernels/interface",
    "records/interface",
    "bundle/interface",
)

IMPORT = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def imported_by(statement: str, root: Path) -> tuple[float, set[str]]:
    """Seconds that a statement takes in a fresh process, and the modules that it imports."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT.format(statement=statement)],
        cwd=root,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    seconds, modules = json.loads(result.stdout)
    return seconds, set(modules)


def loaded(modules: set[str], names: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if name in modules)


def test_importing_the_package_is_light(root):
    runs = [imported_by("import gemmcache", root) for _ in range(3)]
    assert loaded(runs[0][1], HEAVY) == []
    assert min(seconds for seconds, _ in runs) < 0.15


def test_the_version_needs_nothing_else(root):
    _, modules = imported_by("from gemmcache import __version__", root)
    assert {m for m in modules if m.startswith("gemmcache")} == {"gemmcache", "gemmcache._version"}


@pytest.mark.parametrize("module", CORE)
def test_the_core_stays_light(module, root):
    _, modules = imported_by(f"import gemmcache.{module.replace('/', '.')}", root)
    assert loaded(modules, tuple(name for name in HEAVY if name != "msgpack")) == []


def test_names_of_the_package_that_are_not_there(root):
    import gemmcache

    assert not hasattr(gemmcache, "no_such_name")


def imports_of(source: str, package: str) -> set[str]:
    """Every dotted name that a module imports, at any depth; a name imported from a package is one too.

    `package` is the package that relative imports start from.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    return found


def forbidden(names: set[str], banned: tuple[str, ...]) -> list[str]:
    return sorted(n for n in names if any(n == b or n.startswith(b + ".") for b in banned))


def modules_of(folder: Path, root: Path) -> list[tuple[str, Path]]:
    return [
        (str(path.relative_to(root)), path) for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts
    ]


def package_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).parent.parts)


@pytest.mark.parametrize("part", SERVING)
def test_serving_never_imports_the_compiler_the_tuner_or_a_store(part, root):
    modules = modules_of(root / "gemmcache" / part, root)
    assert modules
    wrong = {
        name: names
        for name, path in modules
        if (names := forbidden(imports_of(path.read_text(), package_of(path, root)), NOT_IN_SERVING))
    }
    assert wrong == {}


def test_what_serving_imports_keeps_to_the_same_rule(root):
    """The rule holds for every module of the package that serving reaches, and not for serving's own only."""
    todo = [path for part in SERVING for _, path in modules_of(root / "gemmcache" / part, root)]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        names = imports_of(path.read_text(), package_of(path, root))
        assert forbidden(names, NOT_IN_SERVING) == [], path.relative_to(root)
        for name in names:
            if name.split(".")[0] == "gemmcache":
                base = root.joinpath(*name.split("."))
                todo += [p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()]
    assert root / "gemmcache" / "codec.py" in seen


def test_no_module_unpickles(root):
    wrong = {
        name: names
        for name, path in modules_of(root / "gemmcache", root)
        if (
            names := forbidden(
                imports_of(path.read_text(), package_of(path, root)), ("pickle", "shelve", "marshal", "dill")
            )
        )
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import click", ["click"]),
        ("import click.testing as t", ["click.testing"]),
        ("def f():\n    from gemmcache.tuning import search", ["gemmcache.tuning", "gemmcache.tuning.search"]),
        ("from gemmcache import tuning", ["gemmcache.tuning"]),
        ("from .. import tuning", ["gemmcache.tuning"]),
        ("from ..records.store import Store", ["gemmcache.records.store", "gemmcache.records.store.Store"]),
        ("import importlib\nimportlib.import_module('cutlass.cute')", ["cutlass.cute"]),
        ("__import__('click')", ["click"]),
        ("from gemmcache.records.interface import TuningRecord\nimport clicker", []),
        ("from . import loader", []),
    ],
)
def test_the_rule_finds_every_way_to_import(source, found):
    assert forbidden(imports_of(source, "gemmcache.runtime"), NOT_IN_SERVING) == found
