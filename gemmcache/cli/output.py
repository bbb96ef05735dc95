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
    """A table on stdout; `right` are the indices of right-aligned columns.

    Nothing is ever cut: on a terminal that is too narrow the widest column of text wraps, and if that is not
    enough the terminal wraps the lines.
    """
    numeric = set(right)
    cells = [["" if cell is None else plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, (column, *(row[i] for row in cells)))) for i, column in enumerate(columns)]
    # Brackets, as in `operators[tile=128x256]`, and colons are text here, not markup.
    console = Console(markup=False, emoji=False, highlight=False)
    needed = sum(widths) + 2 * len(widths)
    widest = max((i for i in range(len(columns)) if i not in numeric), key=lambda i: widths[i], default=0)
    room = console.width - (needed - widths[widest])
    wraps = console.is_terminal and needed > console.width and room >= _NARROWEST
    if not wraps:
        console.width = max(needed, len(title))
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        wrapped = wraps and i == widest
        table.add_column(
            column,
            justify="right" if i in numeric else "left",
            no_wrap=not wrapped,
            overflow="fold",
            min_width=_NARROWEST if wrapped else widths[i],
        )
    for row in cells:
        table.add_row(*row)
    console.print(table)


#: Columns that the wrapping column of a table keeps at least.
_NARROWEST = 20
