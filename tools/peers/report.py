"""Where the rows of a run go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from gemmcache.records.files import write_atomically
from tools.peers import table
from tools.peers.interface import Peer, Row
from tools.peers.run import Runner

JSON_FORMAT = 1


class Report:
    """Where rows go: lines to stderr and, after each one, the whole JSON file, so that what ends the run keeps it."""

    def __init__(self, options: argparse.Namespace, peers: Sequence[Peer], environment: dict[str, Any]) -> None:
        self.options, self.names, self.environment = options, [peer.name for peer in peers], environment
        self.versions = {peer.name: peer.version() for peer in peers}
        self.begun = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def row(self, runner: Runner, row: Row) -> None:
        for line in table.perf_lines(row):
            print(line, file=sys.stderr, flush=True)
        self.save(runner)

    def save(self, runner: Runner) -> None:
        if self.options.json is None:
            return
        value = {
            "format": JSON_FORMAT,
            "measured_at": self.begun,
            "environment": self.environment,
            "versions": self.versions,
            "settings": {"rounds": self.options.rounds, "limit_s": self.options.limit, "m": self.options.m},
            "rows": [table.row_value(row) for row in runner.rows],
            "left_out": [str(problem) for problem in runner.left_out],
            "stopped": runner.stopped,
        }
        write_atomically(self.options.json, [json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()])

    def print(self, runner: Runner) -> None:
        """The tables, and what is missing in them."""
        from gemmcache.cli.output import print_table

        rows, names = runner.rows, self.names
        complete = [row for row in rows if not row.failed]
        problems, means = table.problem_table(rows, names), table.mean_table(complete, names)
        print_table("us by peer (! wrong numbers, * no CUDA graph)", *problems, right=_all_but(problems[0], 1, -1))
        print()
        print_table("geometric means (of how many problems); above 1 is faster", *means, right=_all_but(means[0], 0, 1))
        print()
        peers = table.peer_table(rows, names, self.versions)
        print_table("peers: medians of cold start and host time", *peers, right=_all_but(peers[0], 0, 1, -1))
        if runner.left_out:
            print(f"\nleft out, since {runner.stopped}: {len(runner.left_out)} problems")
            for problem in runner.left_out:
                print(f"  {problem}")


def _all_but(columns: Sequence[str], *left: int) -> list[int]:
    return [i for i in range(len(columns)) if i not in {j % len(columns) for j in left}]
