"""Run as a program: tunes without a GPU, in a real worker process, into real records.

    python tune_process.py RECORDS FOLDER LOG COUNT

Times are a function of problem and config. The worker appends `worker <pid>` and `measured <m>` to LOG; the parent
prints the m of each problem once its record is stored, or was there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from gemmcache.build.objects import ObjectCache
from gemmcache.kernels.interface import Config
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import MeasurementPolicy
from gemmcache.records.layers import Records
from gemmcache.target import Host
from gemmcache.tuning.candidates import CandidateSet, CompiledCandidates
from gemmcache.tuning.executor import WorkerExecutor
from gemmcache.tuning.interface import LIBRARY_KEY, Candidate
from gemmcache.tuning.search import search
from gemmcache.tuning.tuner import Tuner
from tests.fakes import ENVIRONMENT, TOOLCHAIN, FakeBench

FAMILY = ProblemFamily.of(4096, 4096)
POLICY = MeasurementPolicy(bootstrap=20)
CANDIDATES = tuple(Candidate(Config.of("fake", tile=64 * (i + 1)), f"{i:064x}", i) for i in range(3))


def note(text: str) -> None:
    fd = os.open(os.environ["TUNE_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def body(pipe, device, toolchain):
    """A worker whose candidates win at every third m; candidate 2 kills it at every tenth."""
    note(f"worker {os.getpid()}")
    pipe.send(("environment", ENVIRONMENT))
    while (task := pipe.recv()) is not None:
        m = task.problem.m

        def strike(key, m=m):
            if key == CANDIDATES[2].kernel and m % 10 == 0:
                os.abort()

        times = {LIBRARY_KEY: 20.0, **{c.kernel: 15.0 + m % 3 * 5 + c.order for c in task.candidates}}
        time.sleep(0.004)
        outcome = search(
            FakeBench(times, on_prepare=strike), task.candidates, task.policy, lambda key: pipe.send(("start", key))
        )
        note(f"measured {m}")
        pipe.send(("outcome", outcome))


def main(records: str, folder: str, log: str, count: int) -> None:
    os.environ["TUNE_LOG"] = log
    with WorkerExecutor(0, TOOLCHAIN, body=body) as executor, Records.open(records, shipped=False) as store:
        where = Path(folder)
        host = Host("x86_64", "x86-64-v3")
        source = CompiledCandidates([], ObjectCache(where), TOOLCHAIN, host, where)
        source.candidates = lambda *_: CandidateSet(CANDIDATES, (), "", "")
        tuner = Tuner(executor, store, source, POLICY)
        problems = [FAMILY.at(m) for m in range(1, count + 1)]
        tuner.tune(problems, progress=lambda problem, record, note: print(problem.m, note, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
