"""Progress on stderr: a bar with rate and remaining time on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: Seconds between two lines where stderr is not a terminal.
LINE_EVERY_S = 10.0


class Ticker:
    """Counts steps of one piece of work. `total` is None where it is not known."""

    def __init__(self, what: str, total: int | None, bar: Progress | None) -> None:
        self._what, self._total, self._bar = what, total, bar
        self._task = bar.add_task(what, total=total) if bar else None
        self._done = 0
        self._started = self._last_line = monotonic()

    def advance(self, detail: str = "") -> None:
        """One step more; `detail` says what was done."""
        self._done += 1
        text = f"{self._what} {detail}".strip()
        if self._bar is not None and self._task is not None:
            rate = self._done / max(monotonic() - self._started, 1e-9)
            self._bar.update(self._task, advance=1, description=f"{text} [{rate:.1f}/s]")
        elif monotonic() - self._last_line >= LINE_EVERY_S:
            self._line(text)

    def _line(self, text: str) -> None:
        self._last_line = monotonic()
        elapsed = self._last_line - self._started
        rate = self._done / max(elapsed, 1e-9)
        left = f"/{self._total}, {(self._total - self._done) / rate:.0f} s left" if self._total else ""
        click.echo(f"{text}: {self._done}{left}, {rate:.2f}/s, {elapsed:.0f} s", err=True)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Ticker]:
    """A ticker for `total` steps of `what`, shown while the block runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Ticker(what, total, None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Ticker(what, total, bar)
