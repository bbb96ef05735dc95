"""A peer's preparation tried in a process of its own first: a crash there costs the peer, not the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gemmcache.problem import Problem
from tools.peers.interface import Bench, Peer

ROOT = Path(__file__).resolve().parent.parent.parent
#: Where compilers of the peers keep what they made. Empty folders make a cold start cold.
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "QUACK_CACHE_DIR", "DG_JIT_CACHE_DIR")
_MARK = "probe failed: "


def cache_folders(folder: str) -> dict[str, str]:
    """Settings that send the caches of all peers into `folder`."""
    return {name: os.path.join(folder, name.lower()) for name in CACHE_VARIABLES}


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """The caches of all peers are empty temporary folders in the block."""
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    # Processes that compile may still write there when it is over.
    with tempfile.TemporaryDirectory(prefix="gemmcache-peers-", ignore_cleanup_errors=True) as folder:
        os.environ.update(cache_folders(folder))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def probe(peer: Peer, problem: Problem, arguments: Sequence[str], limit_s: float) -> str | None:
    """Prepares and runs `peer` once on `problem` in a new process with empty caches; what went wrong, or None.

    `arguments` are those of the command line that say where bundle and records are, with absolute paths.
    """
    words = ["--probe", peer.name, "--probe-problem", json.dumps(problem.to_value()), *arguments]
    with tempfile.TemporaryDirectory(prefix="gemmcache-probe-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **cache_folders(folder)}
        return outcome([sys.executable, "-m", "tools.peer_benchmark", *words], environment, limit_s)


def outcome(command: Sequence[str], environment: dict[str, str], limit_s: float) -> str | None:
    """What went wrong in a process that probes, None if nothing did. It ends with all that it started."""
    with tempfile.TemporaryFile() as said:
        # A file, and not a pipe: compilers leave processes behind that would hold a pipe open.
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if code == 0:
        return None
    if code < 0:
        return f"killed by signal {-code}"
    last = next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), "")
    return last or f"exit code {code}: {lines[-1] if lines else 'nothing said'}"


def attempt(peer: Peer, problem: Problem, bench: Bench) -> int:
    """The work of the process that probes: one preparation and one call. Returns its exit code."""
    from tools.peers.run import describe

    try:
        call = peer.prepare(problem, bench.inputs)
        if call is not None:
            bench.run(call)
    except Exception as error:  # noqa: BLE001 - a peer is code of others; the parent reports it
        print(_MARK + describe(error), file=sys.stderr)
        return 1
    return 0
