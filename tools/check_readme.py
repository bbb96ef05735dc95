"""Checks what README.md and docs/ say against the project itself.

- Every `gemmcache ...` command line in a fenced block parses with the real command line: commands, options,
  their values where a choice is fixed, and arguments.
- Every command is documented by a command line.
- Every relative link leads to a file, and every `#fragment` to a heading.

`python tools/check_readme.py [ROOT]` prints what is wrong, one line each, and exits with 1 if anything is.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
#: Languages of fenced blocks that hold command lines; "" is a block that names none.
SHELLS = ("", "sh", "bash", "shell", "console")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)")
_LINK = re.compile(r"\]\(\s*<?([^)<>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)")
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
_ELLIPSES = ("...", "…")


@dataclass(frozen=True)
class Line:
    """A line of a document: its number, its text, and the language of the fenced block it is in, or None."""

    number: int
    text: str
    block: str | None


def lines_of(text: str) -> Iterator[Line]:
    """The lines of a markdown text without its fences."""
    fence, language = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if fence:
            if match and match[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            else:
                yield Line(number, line, language)
        elif match:
            fence, language = match[1], match[2].lower()
        else:
            yield Line(number, line, None)


def command_lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, words after `gemmcache`) of each command line in the shell blocks of a markdown text."""
    pending, start = "", 0
    for line in lines_of(text):
        if line.block is None or line.block not in SHELLS:
            pending = ""
            continue
        if not pending:
            start = line.number
        joined = pending + line.text
        if joined.rstrip().endswith("\\"):
            pending = joined.rstrip()[:-1] + " "
            continue
        pending = ""
        command = joined.strip().removeprefix("$ ")
        if not re.search(r"\bgemmcache\b", command):
            continue
        try:
            lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>()")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            # An apostrophe in the output that a block shows: not a command line.
            continue
        for part in _simple_commands(words):
            if part and part[0] == "gemmcache":
                yield start, part[1:]


def _simple_commands(words: Sequence[str]) -> Iterator[list[str]]:
    """The commands between `|`, `&&` and the like, without variables in front and redirections behind."""
    part: list[str] = []
    skip = False
    for word in [*words, ";"]:
        if set(word) <= set("|&;()"):
            yield part
            part = []
        elif set(word) <= set("<>&"):
            skip = True
        elif skip:
            skip = False
        elif part or not re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", word):
            part.append(word)


def complaint(command: click.Command, words: Sequence[str], parent: click.Context | None = None) -> str | None:
    """Why `words` would not parse as arguments of `command`; None if they would.

    Files need not exist. An ellipsis among the words stands for whatever else is needed.
    """
    context = click.Context(command, parent=parent, info_name=command.name)
    is_group = isinstance(command, click.Group)
    open_end = not is_group and any(word in _ELLIPSES for word in words)
    try:
        # A group leaves all from the command's name on to the command.
        plain = [word for word in words if is_group or word not in _ELLIPSES]
        values, rest, _ = command.make_parser(context).parse_args(plain)
    except click.UsageError as error:
        return error.format_message()
    if isinstance(command, click.Group):
        if not rest or rest[0] in _ELLIPSES:
            return None
        try:
            found = command.get_command(context, rest[0])
        except ImportError as error:
            return f"command '{rest[0]}' can't be loaded: {error}"
        return f"no command '{rest[0]}'" if found is None else complaint(found, rest[1:], context)
    if rest:
        return f"unexpected argument '{rest[0]}'"
    asks_for_help = any(word in context.help_option_names for word in words)
    for parameter in command.get_params(context):
        value = values.get(parameter.name or "")
        # What was not given is None, an empty tuple or a marker of click's own, depending on its version.
        given = isinstance(value, (str, bool, int)) or (isinstance(value, (list, tuple)) and len(value) > 0)
        if parameter.required and not given and not open_end and not asks_for_help:
            return f"{parameter.get_error_hint(context)} is missing"
        if isinstance(parameter.type, click.Choice):
            for text in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(text, str) and text not in parameter.type.choices:
                    return f"'{text}' is not a choice of {parameter.get_error_hint(context)}"
    return None


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives the headings of a markdown text."""
    found: set[str] = set()
    for line in lines_of(text):
        match = _HEADING.match(line.text) if line.block is None else None
        if match:
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            count = 1
            unique = slug
            while unique in found:
                unique, count = f"{slug}-{count}", count + 1
            found.add(unique)
    return found


def links(text: str) -> Iterator[tuple[int, str]]:
    """(line number, target) of each link and image of a markdown text, outside of code."""
    for line in lines_of(text):
        if line.block is None:
            plain = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", line.text)
            for match in (*_LINK.finditer(plain), *_REFERENCE.finditer(plain)):
                yield line.number, match[1]


def broken_link(target: str, document: Path, root: Path) -> str | None:
    """Why a link of `document` leads nowhere; None if it leads somewhere, or out of the project."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    path, _, fragment = target.partition("#")
    place = (document.parent / path).resolve() if path else document.resolve()
    if not place.is_relative_to(root.resolve()):
        return f"link '{target}' leads out of the project"
    if not place.exists():
        return f"link '{target}' leads to nothing"
    if fragment and place.suffix == ".md" and fragment not in anchors(place.read_text(encoding="utf-8")):
        return f"link '{target}' names a heading that is not there"
    return None


def check(root: Path, cli: click.Group, commands: Iterable[str]) -> list[str]:
    """All that is wrong with the documents of the project at `root`, one line each."""
    documents = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    documents += [root / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")]
    problems: list[str] = []
    shown: set[str] = set()
    for document in documents:
        name = document.relative_to(root)
        if not document.is_file():
            problems.append(f"{name}: is missing")
            continue
        text = document.read_text(encoding="utf-8")
        for number, words in command_lines(text):
            shown.update(words[:1])
            trouble = complaint(cli, words)
            if trouble:
                problems.append(f"{name}:{number}: gemmcache {shlex.join(words)}: {trouble}")
        for number, target in links(text):
            trouble = broken_link(target, document, root)
            if trouble:
                problems.append(f"{name}:{number}: {trouble}")
    problems += [f"command '{c}' is not shown in any document" for c in commands if c not in shown]
    return problems


def main() -> int:
    """Exit code 1 if anything is wrong."""
    from gemmcache.cli.app import COMMANDS, cli

    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    problems = check(root, cli, COMMANDS)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
