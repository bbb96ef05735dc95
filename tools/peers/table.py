"""What is printed of a run, and what goes into its JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import geometric_mean, median
from typing import Any

from gemmcache.tuning.samples import ratio_interval
from tools.peers.interface import BASELINE, EAGER_TIMED, OURS, UNCOVERED, WRONG, Cell, Row

#: The classes of m of the geometric means.
SMALL_M = 64
_BOOTSTRAP, _SEED = 400, 0


def perf_lines(row: Row) -> list[str]:
    """A line a peer: what it took and what that is in TFLOP/s, in GB/s and against the baseline."""
    if row.failed:
        return [f"{row.problem}: {row.failed}"]
    lines = []
    for name, cell in row.cells.items():
        start = f"{row.problem}: {name:17}"
        if cell.us is None:
            if cell.status != UNCOVERED:
                lines.append(f"{start} {cell.status}: {cell.detail}")
            continue
        ratio = row.x_baseline(name)
        against = f"{ratio:6.3f} x {BASELINE}" if ratio else f"     - x {BASELINE}"
        rates = f"{row.problem.flops / cell.us / 1e6:6.0f} TFLOP/s {row.problem.min_bytes / cell.us / 1e3:6.0f} GB/s"
        cold = "" if cell.cold_s is None else f" cold {cell.cold_s:7.2f} s"
        host = "" if cell.host_us is None else f" host {cell.host_us:6.1f} us"
        marks = "  ".join(m for m in (cell.status if cell.status == WRONG else "", eager_mark(cell), cell.detail) if m)
        error = "" if cell.error is None else f" error {cell.error:.1e}"
        lines.append(f"{start} {cell.us:9.2f} us {rates} {against}{cold}{host}{error}  {marks}".rstrip())
    return lines


def eager_mark(cell: Cell) -> str:
    return EAGER_TIMED if cell.mode == EAGER_TIMED else ""


def against_best(row: Row) -> tuple[float, float, float, str] | None:
    """(x, low, high, name): the fastest other peer's time over ours, with its 90 % bootstrap interval. Above 1 ours is
    faster. None where either is missing."""
    other, ours = row.best_other(), row.right_us(OURS)
    if other is None or ours is None:
        return None
    theirs = row.cells[other].samples_us
    low, high = ratio_interval(theirs, row.cells[OURS].samples_us, rounds=_BOOTSTRAP, seed=_SEED)
    return median(theirs) / ours, low, high, other


def _shown(cell: Cell | None) -> str:
    if cell is None or cell.status == UNCOVERED:
        return "-"
    if cell.us is None:
        return cell.status
    # Wrong numbers and calls that no graph could hold are told apart in the table itself.
    return f"{cell.us:.2f}" + ("!" if cell.status == WRONG else "") + ("*" if cell.mode == EAGER_TIMED else "")


def seen(rows: Iterable[Row], names: Sequence[str]) -> list[str]:
    """Of `names`, those that were at least tried on some problem."""
    return [n for n in names if any(n in row.cells and row.cells[n].status != UNCOVERED for row in rows)]


def problem_table(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: microseconds by peer, ours against the baseline and against the best other peer."""
    tried = seen(rows, names)
    lines = []
    for row in rows:
        cells = ["failed" if row.failed else _shown(row.cells.get(name)) for name in tried]
        ratio, best = row.x_baseline(OURS), against_best(row)
        lines.append(
            [str(row.problem.m), str(row.problem.family), *cells]
            + ["-" if ratio is None else f"{ratio:.3f}"]
            + (["-", "-", "-"] if best is None else [f"{best[0]:.3f}", f"{best[1]:.3f}-{best[2]:.3f}", best[3]])
        )
    return ["m", "family", *tried, f"x {BASELINE}", "x best", "90 %", "best other"], lines


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by epilogue (and `all`) and class of m."""
    found: dict[tuple[str, str], list[Row]] = {}
    kinds = sorted({str(row.problem.family.epilogue) for row in rows})
    for kind in ["all", *kinds] if len(kinds) > 1 else kinds:
        of_kind = [row for row in rows if kind in ("all", str(row.problem.family.epilogue))]
        small = [row for row in of_kind if row.problem.m <= SMALL_M]
        if small and len(small) < len(of_kind):
            found[kind, f"m <= {SMALL_M}"] = small
        found[kind, "all"] = of_kind
    return found


def mean_table(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: geometric means of x baseline by peer, and of ours against the best other peer, each with the
    number of problems that it is of: peers cover different ones."""
    tried = [name for name in seen(rows, names) if name != BASELINE]

    def mean(ratios: list[float]) -> str:
        return f"{geometric_mean(ratios):.3f} ({len(ratios)})" if ratios else "-"

    lines = []
    for (kind, ms), members in groups(rows).items():
        cells = [mean([x for row in members if (x := row.x_baseline(name)) is not None]) for name in tried]
        best = mean([found[0] for row in members if (found := against_best(row)) is not None])
        lines.append([kind, ms, str(len(members)), *cells, best])
    return ["epilogue", "m", "problems", *(f"{n} x {BASELINE}" for n in tried), f"{OURS} x best other"], lines


def peer_table(
    rows: Sequence[Row], names: Sequence[str], versions: dict[str, str | None]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: what each peer covered, what it cost before its first result, and host time."""

    def number(values: list[float], digits: int) -> str:
        return f"{median(values):.{digits}f}" if values else "-"

    lines = []
    for name in names:
        cells = [row.cells[name] for row in rows if name in row.cells]
        timed = [cell for cell in cells if cell.us is not None]
        cold = [cell.cold_s for cell in cells if cell.cold_s is not None]
        host = [cell.host_us for cell in timed if cell.host_us is not None]
        lines.append(
            [
                name,
                versions.get(name) or "-",
                str(sum(cell.right_us is not None for cell in timed)),
                number(cold[:1], 2),
                number(cold[1:], 2),
                f"{sum(cold):.1f}" if cold else "-",
                number(host, 1),
                remarks(cells),
            ]
        )
    head = ["peer", "version", "problems", "cold s, first", "cold s, later", "cold s, sum", "host us", "remarks"]
    return head, lines


def remarks(cells: Sequence[Cell]) -> str:
    """How often what went otherwise than well, and why a peer that did nothing did nothing."""
    if cells and all(cell.status == UNCOVERED for cell in cells):
        why = list(dict.fromkeys(cell.detail for cell in cells))
        return why[0] + (f" (and {len(why) - 1} other reasons)" if len(why) > 1 else "")
    counts: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for cell in cells:
        kind = eager_mark(cell) if cell.us is not None and cell.status != WRONG else cell.status
        if kind and kind != UNCOVERED:
            counts[kind] = counts.get(kind, 0) + 1
            reasons.setdefault(kind, cell.detail if kind != EAGER_TIMED else "")
    said = {kind: f"{count} {kind}" for kind, count in counts.items()}
    return "; ".join(f"{text} ({reasons[kind]})" if reasons[kind] else text for kind, text in said.items())


def row_value(row: Row) -> dict[str, Any]:
    """A row for JSON: the whole problem, every sample, and what follows."""
    best = against_best(row)
    return {
        "problem": row.problem.to_value(),
        "text": str(row.problem),
        "failed": row.failed,
        "seconds": round(row.seconds, 3),
        "conditions": row.conditions,
        "peers": {name: _cell_value(row, name, cell) for name, cell in row.cells.items()},
        "x_best": None if best is None else {"x": best[0], "low": best[1], "high": best[2], "other": best[3]},
    }


def _cell_value(row: Row, name: str, cell: Cell) -> dict[str, Any]:
    value = asdict(cell)
    # Infinity is not JSON.
    value["error"] = None if cell.error is None else cell.error if cell.error < float("inf") else "infinite"
    value["us"], value["x_" + BASELINE] = cell.us, row.x_baseline(name)
    return value
