"""The documents are checked, and the checker finds what it is there for."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from tools import check_readme
from tools.check_readme import anchors, check, command_lines, complaint, links


def test_the_documents_of_this_project(root):
    from gemmcache.cli.app import COMMANDS, cli

    assert check(root, cli, COMMANDS) == []


@click.group()
def cli() -> None:
    """A command line as the checker sees one."""


@cli.command()
@click.argument("model")
@click.argument("more", nargs=-1)
@click.option("--out", "-o", required=True)
@click.option("--level", type=click.Choice(["low", "high"]))
@click.option("--fast/--slow")
@click.option("--count", type=int, multiple=True)
def build(**_: object) -> None:
    """Builds."""


@cli.group()
def records() -> None:
    """A group of commands."""


@records.command(name="list")
@click.option("--json", is_flag=True)
def list_(**_: object) -> None:
    """Lists."""


@pytest.mark.parametrize(
    "line",
    [
        "build m --out x",
        "build m a b c -o x --fast --slow --level high --count 1 --count 2",
        "build --out=x m",
        "build --help",
        "build -o x ...",
        "build …",
        "...",
        "records list --json",
        "records",
        "--help",
        "",
    ],
)
def test_command_lines_that_parse(line):
    assert complaint(cli, line.split()) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("build m", "is missing"),
        ("build --out x", "is missing"),
        ("build m --out", "requires an argument"),
        ("build m --out x --nope", "--nope"),
        ("build m --out x --level middle", "'middle' is not a choice"),
        ("biuld m", "no command 'biuld'"),
        ("records list extra", "unexpected argument 'extra'"),
        ("records show", "no command 'show'"),
        ("records list --yaml", "--yaml"),
        ("--nope build", "--nope"),
    ],
)
def test_command_lines_that_do_not_parse(line, message):
    assert message in str(complaint(cli, line.split()))


def test_command_lines_are_found_in_shell_blocks_only():
    text = """
    gemmcache indented, no fence
Use `gemmcache inline`.

```sh
pip install gemmcache
gemmcache one --flag   # a remark
GEMMCACHE_STRICT=1 gemmcache two | head && gemmcache three > out.txt; echo gemmcache
gemmcache four \\
  --long \\
  x
```

```console
$ gemmcache five 'a b'
gemmcache: it's an error message
```

~~~
gemmcache six
~~~

```python
gemmcache = 1
```
"""
    assert list(command_lines(text)) == [
        (7, ["one", "--flag"]),
        (8, ["two"]),
        (8, ["three"]),
        (9, ["four", "--long", "x"]),
        (15, ["five", "a b"]),
        (20, ["six"]),
    ]


def test_links_and_anchors():
    text = """# Title, *with* `code`!
## Same
## Same
see [a](one.md), ![b](two.png "title") and [![c](three.png)](four.md#x) but `[not](this.md)`
[ref]: five.md
```
[nor](that.md)
# not a heading
```
"""
    assert [target for _, target in links(text)] == ["one.md", "two.png", "three.png", "four.md#x", "five.md"]
    assert anchors(text) == {"title-with-code", "same", "same-1"}


def project(folder: Path, readme: str) -> Path:
    (folder / "docs").mkdir()
    (folder / "docs" / "more.md").write_text("# More\n\n[up](../README.md#top) [on the web](https://x.y/z)\n")
    (folder / "README.md").write_text("# Top\n" + readme)
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        (folder / name).write_text("# x\n")
    return folder


def test_a_project_without_faults(tmp_path):
    readme = "[m](docs/more.md#more) [t](#top)\n```sh\ngemmcache build m -o x\ngemmcache records list\n```\n"
    assert check(project(tmp_path, readme), cli, ["build", "records"]) == []


@pytest.mark.parametrize(
    ("readme", "problem"),
    [
        ("[m](docs/less.md)", "README.md:2: link 'docs/less.md' leads to nothing"),
        ("[m](docs/more.md#less)", "names a heading that is not there"),
        ("[m](#bottom)", "names a heading that is not there"),
        ("[m](../x)", "leads out of the project"),
        ("```sh\ngemmcache build m\n```", "README.md:3: gemmcache build m: '--out' / '-o' is missing"),
        ("```sh\ngemmcache bild\n```", "no command 'bild'"),
        ("", "command 'build' is not shown in any document"),
    ],
)
def test_faults_are_found(tmp_path, readme, problem):
    assert any(problem in p for p in check(project(tmp_path, readme), cli, ["build"]))


def test_a_missing_document_is_a_fault(tmp_path):
    (project(tmp_path, "") / "CHANGELOG.md").unlink()
    assert "CHANGELOG.md: is missing" in check(tmp_path, cli, [])


def test_exit_codes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check_readme.py", str(project(tmp_path, "[m](none)"))])
    assert check_readme.main() == 1
    assert "leads to nothing" in capsys.readouterr().out
