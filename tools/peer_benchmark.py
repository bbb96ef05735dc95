"""Times gemmcache beside other libraries, on the same problems in one run, on the GPU at hand.

    python -m tools.peer_benchmark [BUNDLE] [--problems FILE] [--records PATH] [--json FILE] [--budget SECONDS]

Problems are those of FILE (a list as `gemmcache shapes` takes), or else those that BUNDLE was tuned for. Lines of
progress go to stderr, tables to stdout. docs/peer-benchmark.md says how it measures.

Exit codes: 0 ok, 1 if nothing was measured or gemmcache gave wrong numbers, 2 usage, 3 integrity, 4 incompatible, 5
tool or GPU failure, 130 interrupt. A peer that fails is a line in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the folder above is not where Python looks
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gemmcache.environment import detect_environment
from gemmcache.errors import (
    EXIT_FINDINGS,
    EXIT_INTERRUPT,
    EXIT_OK,
    EXIT_TOOL,
    DeviceError,
    GemmcacheError,
    UsageError,
)
from gemmcache.ladder import parse_ms
from gemmcache.problem import Problem
from gemmcache.records.interface import MeasurementPolicy, TuningRecord
from tools.peers import probe
from tools.peers.interface import FAILED, OURS, TIMEOUT, WRONG, Bench, Peer, Row
from tools.peers.report import Report
from tools.peers.run import Runner, Settings


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="peer_benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("bundle", nargs="?", help="the bundle that gemmcache serves from")
    found.add_argument("--problems", type=Path, metavar="FILE", help="a JSON or YAML list of problems")
    found.add_argument(
        "--m", metavar="MS", help="only these ms (1,16 or 1..8192) instead of those of the list or bundle"
    )
    found.add_argument(
        "--only", metavar="TEXT", help="only problems whose text, as in the lines of progress, holds TEXT"
    )
    found.add_argument("--peers", metavar="NAMES", help="only these, separated by commas")
    found.add_argument("--records", type=Path, metavar="PATH", help="records that name the operators library's configs")
    found.add_argument("--rounds", type=_positive(int), default=Settings().rounds, help="samples a peer and problem")
    found.add_argument(
        "--limit", type=_positive(float), default=Settings().limit_s, metavar="SECONDS", help="to prepare a peer once"
    )
    found.add_argument(
        "--budget", type=_positive(float), default=float("inf"), metavar="SECONDS", help="begin no problem after that"
    )
    found.add_argument("--subprocess", action="store_true", help="try each preparation in a process of its own first")
    found.add_argument("--keep-caches", action="store_true", help="let peers find what they compiled in earlier runs")
    found.add_argument("--json", type=Path, metavar="FILE", help="all samples, and the environment")
    found.add_argument("--probe", help=argparse.SUPPRESS)
    found.add_argument("--probe-problem", help=argparse.SUPPRESS)
    return found


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError(f"{text} is not positive and finite")
        return value

    read.__name__ = f"positive {kind.__name__}"
    return read


def all_peers(bundle: str | None, records: Sequence[TuningRecord] | None) -> list[Peer]:
    """Every peer, the baseline first and gemmcache last."""
    from tools.peers.kernel_peers import DeepGemm, DeepGemmBlock, Gemmcache, Operators, Quack, QuackInterleaved
    from tools.peers.torch_peers import Cublas, CublasFast, Eager, Inductor

    kernels: list[Peer] = [Quack(), QuackInterleaved(), Operators(records), DeepGemm(), DeepGemmBlock()]
    return [Cublas(), CublasFast(), Eager(), Inductor(), *kernels, Gemmcache(bundle)]


def chosen(peers: Sequence[Peer], names: str | None) -> list[Peer]:
    """The peers of those names. Raises `UsageError` for a name that none has."""
    if names is None:
        return list(peers)
    wanted = [name.strip() for name in names.split(",")]
    known = [peer.name for peer in peers]
    for name in wanted:
        if name not in known:
            raise UsageError(f"no peer is called '{name}'", remedy=f"one of {', '.join(known)}")
    return [peer for peer in peers if peer.name in wanted]


def problems_of_bundle(path: str) -> list[Problem]:
    """The tuned problems of the part of a bundle that serves here, without loading any of its code."""
    from contextlib import closing

    from gemmcache.bundle.reader import BundleReader
    from gemmcache.runtime.loader import choose_part, detect_facts

    with closing(BundleReader.open(path)) as reader:
        part, _ = choose_part(reader.manifest.parts, detect_facts())
    return [table.family.at(entry.m) for table in part.tables for entry in table.entries]


def problems_of(
    options: argparse.Namespace, of_bundle: Callable[[str], list[Problem]] = problems_of_bundle
) -> list[Problem]:
    """What to measure, in the order of its source, each once. Raises `UsageError` if that is nothing."""
    ms = parse_ms(options.m) if options.m else None
    if options.problems:
        from gemmcache.models.source import load_workload

        found = list(load_workload(options.problems).problems(ms))
    elif options.bundle:
        found = of_bundle(options.bundle)
        if ms:
            found = [family.at(m) for family in dict.fromkeys(p.family for p in found) for m in ms]
    else:
        raise UsageError("nothing to measure", remedy="name a bundle, or a list with --problems")
    found = [p for p in dict.fromkeys(found) if options.only is None or options.only in str(p)]
    if not found:
        raise UsageError("no problem is left to measure", remedy="look at --only and --m")
    return found


def read_records(path: Path | None) -> list[TuningRecord] | None:
    """The records of a `.jsonl` file, of a folder of such files, or of a store; None without a path."""
    from gemmcache.records.interchange import read_jsonl
    from gemmcache.records.layers import Records, read_folder
    from gemmcache.records.store import is_store

    if path is None:
        return None
    if not path.is_dir():
        return list(read_jsonl(path))
    if not is_store(path):
        return list(read_folder(path).all())
    with Records.open(path, shipped=False, read_only=True) as records:
        return [layered.record for layered in records.all()]


def exit_code(rows: Sequence[Row], lost: bool) -> int:
    """The exit code of a run that came to its end, or lost the device: ours must have been right wherever it was
    tried."""
    ours = [row.cells[OURS].status for row in rows if OURS in row.cells]
    measured = any(cell.us is not None for row in rows for cell in row.cells.values())
    if lost:
        return EXIT_TOOL
    return EXIT_FINDINGS if not measured or {WRONG, FAILED, TIMEOUT} & set(ours) else EXIT_OK


def measure(
    options: argparse.Namespace,
    peers: Sequence[Peer],
    problems: Sequence[Problem],
    open_bench: Callable[[Problem], Bench],
    environment: dict[str, Any],
    try_first: Callable[[Peer, Problem], str | None] | None,
) -> int:
    """Runs and reports; returns the exit code. Interrupted, it prints what there is."""
    report = Report(options, peers, environment)
    policy = MeasurementPolicy()
    runner = Runner(
        peers,
        open_bench,
        Settings(options.rounds, options.limit, options.budget, policy.max_error_milli / 1000),
        try_first,
    )
    runner.on_row = partial(report.row, runner)

    def hang() -> None:
        runner.stopped = runner.rows[-1].failed = "a peer hangs beyond help"
        report.save(runner)
        report.print(runner)
        sys.stdout.flush()

    runner.on_hang = hang
    try:
        rows = runner.run(problems)
    except KeyboardInterrupt:
        report.save(runner)
        report.print(runner)
        print("peer_benchmark: interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    report.save(runner)
    report.print(runner)
    return exit_code(rows, runner.lost)


def on_device(options: argparse.Namespace) -> int:
    """The run on the current CUDA device. Raises `DeviceError` without one."""
    import torch

    from gemmcache.kernels.identity import detect_toolchain
    from gemmcache.kernels.registry import kernel_families
    from tools.peers.bench import CudaBench, settle_clocks

    peers = chosen(all_peers(options.bundle, read_records(options.records)), options.probe or options.peers)
    problems = [] if options.probe else problems_of(options)
    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device is visible", remedy="run it on a machine with a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.probe:
        problem = Problem.from_value(json.loads(options.probe_problem))
        return probe.attempt(peers[0], problem, CudaBench(problem, MeasurementPolicy(), device, sets=1))
    environment = detect_environment(detect_toolchain(kernel_families().values()), device.index).to_value()
    settle_clocks(device)
    given = [] if options.bundle is None else [os.path.abspath(options.bundle)]
    given += [] if options.records is None else ["--records", str(options.records.absolute())]

    def try_first(peer: Peer, problem: Problem) -> str | None:
        return probe.probe(peer, problem, given, options.limit)

    return measure(
        options,
        peers,
        problems,
        lambda problem: CudaBench(problem, MeasurementPolicy(), device),
        environment,
        try_first if options.subprocess else None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        # A process that probes was given its own.
        with nullcontext() if options.keep_caches or options.probe else probe.empty_caches():
            return on_device(options)
    except GemmcacheError as error:
        print(f"peer_benchmark: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  try: {error.remedy}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("peer_benchmark: interrupted", file=sys.stderr)
        return EXIT_INTERRUPT


if __name__ == "__main__":
    sys.exit(main())
