"""Runs commands in a pseudo-terminal and draws what they printed as an SVG.

    python tools/terminal_picture.py --out docs/terminal.svg 'make bundle' 'make test'

Long outputs are cut to their last lines, which the picture marks.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 118
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]")


def captured(command: str) -> str:
    """What `command` writes to a terminal of `COLUMNS` columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, shell=True, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    data = io.BytesIO()
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:
            break
        if not piece:
            break
        data.write(piece)
    process.wait()
    os.close(ours)
    return data.getvalue().decode(errors="replace")


def last_frame(text: str) -> list[str]:
    """Lines as they stand at the end: carriage returns overwrite, cursor movements are dropped."""
    lines = _CURSOR.sub("", text).replace("\r\n", "\n").split("\n")
    return [line.rsplit("\r", 1)[-1].rstrip() for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=16, help="lines of output kept of each command")
    options = parser.parse_args()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in options.commands:
        lines = [line for line in last_frame(captured(command)) if line.strip()]
        console.print(Text(f"$ {command}", style="bold green"))
        if len(lines) > options.lines:
            console.print(Text(f"  ... {len(lines) - options.lines} lines", style="dim"))
        for line in lines[-options.lines :]:
            console.print(Text.from_ansi(line), overflow="crop", no_wrap=True)
    svg = console.export_svg(title="gemmcache")
    # The fonts of the default style are fetched from the network by whoever looks at the picture.
    options.out.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
