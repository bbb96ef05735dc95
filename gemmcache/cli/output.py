"""What commands share: JSON and tables on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """The `--json` flag, the same for every command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of a table.")(function)


def print_json(value: object) -> None:
    """One JSON document on stdout, keys sorted."""
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def plain(text: object) -> str:
    """`text` with control characters escaped: a name in a file must not move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = ()
) -> None:
    """A table on stdout; `right` are the indices of right-aligned columns. Never cut to the terminal when piped."""
    numeric = set(right)
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*("" if cell is None else plain(cell) for cell in row))
    # Brackets, as in `operators[tile=128x256]`, and colons are text here, not markup.
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 4096
    console.print(table)
