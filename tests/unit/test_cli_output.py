"""Tables lose nothing, however narrow the terminal."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from gemmcache.cli import output

COLUMNS = ("m", "N x K", "us", "choice")
ROWS = [(m, "28672x4096 bfloat16", f"{m / 7:.2f}", "quack[cluster=1x1 kernel=sm90 pingpong=true]") for m in (1, 8192)]


def shown(monkeypatch, capsys, width, terminal=True):
    def console(**options):
        return Console(width=width, force_terminal=terminal, color_system=None, **options)

    monkeypatch.setattr(output, "Console", console)
    output.print_table("title", COLUMNS, ROWS, right=(0, 2))
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 60, 80, 120, 300])
def test_every_cell_is_there_whole_or_wrapped(monkeypatch, capsys, width):
    text = shown(monkeypatch, capsys, width)
    assert "…" not in text
    together = re.sub(r"\s+", "", text)
    for row in ROWS:
        for cell in row[:3]:
            assert re.sub(r"\s+", "", str(cell)) in together


def test_only_the_widest_text_wraps(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, 70).splitlines()
    assert max(map(len, lines)) <= 70
    assert any("8192  28672x4096 bfloat16  1170.29" in line for line in lines)


def test_piped_output_is_one_line_a_row(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, 40, terminal=False).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert lines[-1].split()[-1] == "pingpong=true]"
