"""Writes the table of `gemmcache.policy.RULES` into docs/policy.md, between its two markers.

    python tools/generate_policy_table.py [--check] [FILE]

With `--check` nothing is written: exit code 1 if the file does not hold the table as it would be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gemmcache.policy import RULES, Rule

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "policy.md"
BEGIN = "<!-- written by tools/generate_policy_table.py -->"
END = "<!-- end of what tools/generate_policy_table.py writes -->"

#: What each field is, and when two known values are the same; `gemmcache.policy` holds the comparison itself.
MEANING = {
    "arch": "the GPU's architecture with its suffix, as in `sm_90a`: equal",
    "host": "the CPU: same machine and C library, and an instruction set level at least that of the bundle",
    "tvm_ffi": "version of apache-tvm-ffi: equal up to the minor version",
    "sm_count": "number of SMs: equal",
    "product": "the GPU's product, as in `NVIDIA H200`: equal",
    "driver": "the NVIDIA driver that the records were measured with: equal",
    "cuda_runtime": "the CUDA version of torch that the records were measured with: equal",
}


def row(rule: Rule) -> str:
    """The table row of a rule. Raises `ValueError` for a field that nothing is said of here."""
    if rule.field not in MEANING:
        raise ValueError(f"field '{rule.field}' has no meaning in {Path(__file__).name}")
    differs, unknown = rule.verdict.name.lower(), rule.unknown.name.lower()
    return f"| `{rule.field}` | {MEANING[rule.field]} | {differs} | {unknown} | {rule.remedy} |"


def table(rules: Sequence[Rule] = RULES) -> str:
    """The rules as a markdown table."""
    head = (
        "| Field | What it is, and when it is the same | If it differs | If unknown | Remedy |",
        "|---|---|---|---|---|",
    )
    return "\n".join([*head, *map(row, rules)])


def replaced(text: str, rules: Sequence[Rule] = RULES) -> str:
    """`text` with the table between its markers. Raises `ValueError` unless each marker is there once, in order."""
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"the lines '{BEGIN}' and '{END}' must be there once each, in this order")
    return f"{before}{begin}{table(rules)}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 if the file is stale (with `--check`) or can't be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say whether the file is up to date")
    parser.add_argument("file", nargs="?", type=Path, default=DOCUMENT, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        text = options.file.read_text(encoding="utf-8")
        wanted = replaced(text)
        if text == wanted:
            return 0
        if options.check:
            print(f"{options.file} is stale: run python tools/generate_policy_table.py", file=sys.stderr)
            return 1
        options.file.write_text(wanted, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
