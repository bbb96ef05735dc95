"""The peer benchmark goes on whatever a peer does, ranks only what is right, and says what is missing."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from statistics import geometric_mean

import pytest

from gemmcache.errors import DeviceError, MeasurementError, UsageError
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import MeasurementPolicy
from tests.conftest import ROOT
from tests.fakes import ENVIRONMENT
from tools import peer_benchmark
from tools.peers import probe, table, watchdog
from tools.peers.interface import (
    EAGER_TIMED,
    FAILED,
    GRAPH,
    OK,
    TIMEOUT,
    UNCOVERED,
    WRONG,
    Bench,
    Cell,
    Peer,
    Row,
)
from tools.peers.run import MAX_TIMEOUTS, Runner, Settings, describe
from tools.peers.watchdog import PeerTimeout, time_limit

FAMILY = ProblemFamily.of(256, 128)
PROBLEM = FAMILY.at(16)
FAST = Settings(rounds=3, limit_s=0.2)


class FakePeer(Peer):
    """A peer that takes `us` and does what `act` does when it is prepared."""

    def __init__(self, name, us=10.0, act=lambda: None, ranked=True, absent=None, covers=lambda problem: True):
        self.name, self.us, self.act, self.ranked, self.absent, self.covers = name, us, act, ranked, absent, covers
        self.prepared = []

    def available(self):
        return self.absent

    def uncovered(self, problem):
        return None if self.covers(problem) else "not that one"

    def prepare(self, problem, inputs):
        self.prepared.append(problem)
        found = self.act()
        return None if found == "nothing" else (lambda i: self)

    def note(self, problem):
        return f"note of {self.name}"


class FakeBench(Bench):
    """A bench whose calls return their peer; times are those of the peers, or drawn from an iterator of theirs."""

    inputs = (None,)

    def __init__(self, errors=(), modes=(), lost_after=None):
        self.errors, self.modes, self.lost_after = dict(errors), dict(modes), lost_after
        self.sampled, self.peers = [], {}

    def run(self, call):
        return call(None)

    def error(self, result):
        return self.errors.get(result.name, 0.001)

    def ready(self, name, call):
        self.peers[name] = call(None)
        return self.modes.get(name, GRAPH)

    def sample_us(self, name):
        self.sampled.append(name)
        us = self.peers[name].us
        if isinstance(us, Exception):
            raise us
        return us if isinstance(us, (int, float)) else next(us)

    def host_us(self, call, us):
        return us / 2

    def check_device(self):
        if self.lost_after is not None and len(self.sampled) >= self.lost_after:
            raise DeviceError("the device is lost")

    def conditions(self):
        return {"sm_mhz": 1980.0}


def runner_of(*peers, bench=None, settings=FAST, **more):
    bench = bench or FakeBench()
    return Runner(list(peers), lambda problem: bench, settings, **more), bench


def raising(error):
    def act():
        raise error

    return act


def hang():
    time.sleep(30)


def swallow():
    """What a tuner does that tries one config after another."""
    while True:
        try:
            time.sleep(30)
        except Exception:  # noqa: BLE001
            continue


# Running


def test_all_peers_are_measured_in_interleaved_rounds():
    runner, bench = runner_of(FakePeer("cublas", 20.0), FakePeer("other", 10.0), FakePeer("gemmcache", 8.0))
    (row,) = runner.run([PROBLEM])
    assert {name: (cell.status, cell.us, len(cell.samples_us)) for name, cell in row.cells.items()} == {
        "cublas": (OK, 20.0, 3),
        "other": (OK, 10.0, 3),
        "gemmcache": (OK, 8.0, 3),
    }
    turns = [tuple(bench.sampled[i : i + 3]) for i in range(0, 12, 3)]
    assert turns[1] == ("cublas", "other", "gemmcache")
    assert turns[::2] == [turns[1][::-1]] * 2
    cell = row.cells["gemmcache"]
    assert (cell.detail, cell.mode, cell.host_us, cell.error) == ("note of gemmcache", GRAPH, 4.0, 0.001)
    assert cell.cold_s is not None
    assert row.conditions == {"sm_mhz": 1980.0}
    assert (row.best_other(), row.x_baseline("other"), row.x_baseline("gemmcache")) == ("other", 2.0, 2.5)


def test_the_first_round_warms_up_only():
    runner, _ = runner_of(FakePeer("cublas", itertools.chain([99.0], itertools.repeat(10.0))))
    (row,) = runner.run([PROBLEM])
    assert row.cells["cublas"].samples_us == [10.0] * 3


@pytest.mark.parametrize(
    ("act", "status", "said"),
    [
        (raising(RuntimeError("no\n  kernel")), FAILED, "RuntimeError: no kernel"),
        (raising(MeasurementError("odd shape")), FAILED, "odd shape"),
        (raising(ImportError("no module")), FAILED, "ImportError: no module"),
        (raising(DeviceError("it says so, and the device is well")), FAILED, "it says so"),
        (hang, TIMEOUT, "not done after 0.2 s"),
        (swallow, TIMEOUT, "not done after 0.2 s"),
        (lambda: "nothing", UNCOVERED, "not covered"),
    ],
)
def test_whatever_a_peer_does_the_others_are_measured(act, status, said):
    runner, bench = runner_of(FakePeer("cublas"), FakePeer("bad", act=act), FakePeer("gemmcache", 5.0))
    (row,) = runner.run([PROBLEM])
    assert row.cells["bad"].status == status
    assert said in row.cells["bad"].detail
    assert row.cells["bad"].us is None
    assert "bad" not in bench.sampled
    assert row.x_baseline("gemmcache") == 2.0


def test_a_peer_that_fails_while_it_is_timed_is_left_out_of_the_rest():
    times = itertools.chain([10.0, 10.0], [0])

    def draw():
        for us in times:
            if not us:
                raise RuntimeError("launch failed")
            yield us

    runner, bench = runner_of(FakePeer("cublas"), FakePeer("bad", draw()), FakePeer("broken", RuntimeError("never")))
    (row,) = runner.run([PROBLEM])
    assert row.cells["bad"].status == row.cells["broken"].status == FAILED
    assert row.cells["bad"].us is None
    assert bench.sampled.count("bad") == 3
    assert bench.sampled.count("broken") == 1
    assert row.cells["cublas"].us == 10.0


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_samples_that_can_not_be_trusted_are_no_result(bad):
    runner, _ = runner_of(FakePeer("cublas"), FakePeer("bad", itertools.cycle([9.0, bad])))
    (row,) = runner.run([PROBLEM])
    assert row.cells["bad"].status == FAILED
    assert row.best_other() == "cublas"


@pytest.mark.parametrize("error", [0.011, float("inf"), float("nan")])
def test_a_wrong_peer_is_marked_and_not_ranked(error):
    bench = FakeBench(errors={"fast": error})
    runner, _ = runner_of(FakePeer("cublas"), FakePeer("fast", 1.0), FakePeer("gemmcache", 5.0), bench=bench)
    (row,) = runner.run([PROBLEM])
    assert (row.cells["fast"].status, row.cells["fast"].us) == (WRONG, 1.0)
    assert row.x_baseline("fast") is None
    assert row.best_other() == "cublas"
    columns, (cells,) = table.problem_table([row], ["cublas", "fast", "gemmcache"])
    assert cells[columns.index("fast")] == "1.00!"
    assert any("wrong" in line for line in table.perf_lines(row))
    json.dumps(table.row_value(row), allow_nan=False)


def test_a_peer_that_solves_another_problem_is_not_the_best():
    runner, _ = runner_of(FakePeer("cublas"), FakePeer("easy", 1.0, ranked=False), FakePeer("gemmcache", 5.0))
    (row,) = runner.run([PROBLEM])
    assert row.best_other() == "cublas"
    assert row.x_baseline("easy") == 10.0


def test_a_peer_that_hangs_again_and_again_is_given_up():
    peer = FakePeer("bad", act=hang)
    runner, _ = runner_of(FakePeer("cublas"), peer, settings=Settings(rounds=1, limit_s=0.05))
    rows = runner.run([FAMILY.at(m) for m in (1, 2, 3, 4)])
    assert len(peer.prepared) == MAX_TIMEOUTS
    assert [row.cells["bad"].status for row in rows] == [TIMEOUT] * 4
    assert "not tried again" in rows[-1].cells["bad"].detail


def test_what_is_absent_or_does_not_cover_a_problem_is_not_prepared():
    absent, partly = FakePeer("absent", absent="not installed"), FakePeer("partly", covers=lambda p: p.m > 1)
    runner, _ = runner_of(absent, partly)
    rows = runner.run([FAMILY.at(1), FAMILY.at(2)])
    assert absent.prepared == []
    assert partly.prepared == [FAMILY.at(2)]
    assert [row.cells["absent"].detail for row in rows] == ["not installed"] * 2
    assert [row.cells["partly"].status for row in rows] == [UNCOVERED, OK]


def test_a_lost_device_ends_the_run_and_keeps_what_was_measured():
    bench = FakeBench(lost_after=9)
    flaky = FakePeer("flaky", itertools.chain([9.0] * 4, [float("nan")]))

    def sample_us(name, real=bench.sample_us):
        if len(bench.sampled) >= 9 and name == "flaky":
            raise RuntimeError("illegal memory access")
        return real(name)

    bench.sample_us = sample_us
    runner, _ = runner_of(FakePeer("cublas"), flaky, bench=bench)
    seen = []
    runner.on_row = seen.append
    first, second = runner.run([FAMILY.at(m) for m in (1, 2, 3)])
    assert first.x_baseline("cublas") == 1.0
    assert (second.failed, second.best_other()) == ("the device is lost", None)
    assert (runner.lost, runner.left_out) == (True, [FAMILY.at(3)])
    assert seen == [first, second]
    assert peer_benchmark.exit_code(runner.rows, runner.lost) == 5


def test_inputs_that_do_not_fit_cost_their_problem_only():
    def open_bench(problem):
        if problem.m == 1:
            raise RuntimeError("CUDA out of memory")
        return FakeBench()

    runner = Runner([FakePeer("cublas")], open_bench, FAST)
    first, second = runner.run([FAMILY.at(1), FAMILY.at(2)])
    assert "out of memory" in first.failed
    assert second.cells["cublas"].us == 10.0
    assert table.perf_lines(first) == [f"{first.problem}: {first.failed}"]
    _, cells = table.problem_table([first, second], ["cublas"])
    assert (cells[0][2], cells[1][2]) == ("failed", "10.00")


def test_the_budget_leaves_out_what_would_not_fit():
    clock = itertools.count(0, 1.0)
    runner, _ = runner_of(FakePeer("cublas"), settings=Settings(rounds=1, budget_s=20.0))
    runner.clock = lambda: float(next(clock))
    problems = [FAMILY.at(m) for m in range(1, 9)]
    rows = runner.run(problems)
    assert 0 < len(rows) < 8
    assert runner.left_out == problems[len(rows) :]
    assert "budget" in runner.stopped
    spent = sum(row.seconds for row in rows)
    assert spent <= 20.0


def test_an_interrupt_keeps_what_there_is():
    calls = itertools.count()
    peer = FakePeer("cublas", act=lambda: raising(KeyboardInterrupt())() if next(calls) else None)
    runner, _ = runner_of(peer)
    with pytest.raises(KeyboardInterrupt):
        runner.run([FAMILY.at(m) for m in (1, 2, 3)])
    assert [row.failed for row in runner.rows] == ["", "interrupted"]
    assert runner.left_out == [FAMILY.at(3)]


def test_a_peer_that_dies_in_the_probe_is_not_prepared_here():
    bad, good = FakePeer("bad"), FakePeer("cublas")
    runner, _ = runner_of(bad, good, probe=lambda peer, problem: "killed by signal 11" if peer is bad else None)
    (row,) = runner.run([PROBLEM])
    assert bad.prepared == []
    assert "killed by signal 11" in row.cells["bad"].detail
    assert row.cells["cublas"].us == 10.0


def test_a_host_call_that_fails_costs_the_host_time_only():
    bench = FakeBench()
    bench.host_us = lambda call, us: raising(RuntimeError("host"))()
    runner, _ = runner_of(FakePeer("cublas"), bench=bench)
    (row,) = runner.run([PROBLEM])
    assert (row.cells["cublas"].us, row.cells["cublas"].host_us) == (10.0, None)
    assert "host" in row.cells["cublas"].detail


def test_errors_are_told_in_a_short_line():
    assert describe(ValueError("a\n\n  b")) == "ValueError: a b"
    assert describe(MeasurementError("plain")) == "plain"
    assert describe(ValueError()) == "ValueError: no message"
    assert len(describe(ValueError("x" * 5000))) == 300


# The watchdog


def test_what_ends_in_time_is_left_alone():
    with time_limit(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(PeerTimeout, match=r"0\.05 s"), time_limit(0.05):
        time.sleep(5)
    assert not isinstance(PeerTimeout(), Exception)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_limit_is_positive(seconds):
    with pytest.raises(UsageError), time_limit(seconds):
        pass


FOREIGN = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
HOLDS_LOCK = "sum(iter(range(10**13)))"


@pytest.mark.parametrize(("hang", "code", "said"), [(FOREIGN, 5, "saved"), (HOLDS_LOCK, 1, "Timeout")])
def test_code_that_no_exception_reaches_ends_with_the_process(hang, code, said):
    script = f"""
import sys
from tools.peers.watchdog import time_limit
with time_limit(0.2, lambda: print("saved", file=sys.stderr, flush=True), grace=0.3):
    {hang}
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert said in done.stderr


HUNG = """
import hashlib, sys
from tests.unit.test_peer_benchmark import *
from tools.peers import watchdog
watchdog.GRACE_SECONDS = 0.3
act = iter([lambda: None, lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)])
peers = [FakePeer("cublas"), FakePeer("bad", act=lambda: next(act)())]
options = options_of("--rounds", "3", "--limit", "0.3", "--json", sys.argv[1])
problems = [FAMILY.at(m) for m in (1, 2, 3)]
peer_benchmark.measure(options, peers, problems, lambda problem: FakeBench(), {}, None)
"""


def test_a_run_that_hangs_beyond_help_ends_with_its_tables(tmp_path):
    path = tmp_path / "found.json"
    words = [sys.executable, "-c", HUNG, str(path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5, done.stderr
    assert "10.00" in done.stdout
    assert f"  {FAMILY.at(3)}" in done.stdout
    value = json.loads(path.read_text())
    assert [row["failed"] for row in value["rows"]] == ["", "a peer hangs beyond help"]
    assert value["rows"][0]["peers"]["bad"]["us"] == 10.0
    assert value["left_out"] == [str(FAMILY.at(3))]


# Probing


def run_child(code, limit_s=20.0):
    return probe.outcome([sys.executable, "-c", code], {"PATH": "/usr/bin:/bin"}, limit_s)


def test_a_probe_tells_how_its_process_ended():
    assert run_child("pass") is None
    assert run_child("import sys; sys.exit('worse')") == "exit code 1: worse"
    assert run_child("import os; os._exit(3)") == "exit code 3: nothing said"
    assert run_child("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)") == "killed by signal 11"
    said = "import sys; print('probe failed: no kernel\\nnoise', file=sys.stderr); sys.exit(1)"
    assert run_child(said) == "no kernel"


def test_a_probe_that_hangs_ends_with_all_that_it_started():
    # The child's own child holds its output open.
    start = time.monotonic()
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); {}"
    assert run_child(code.format("time.sleep(60)"), 1.0) == "not done after 1 s"
    assert run_child(code.format("pass")) is None
    assert time.monotonic() - start < 20


def test_the_process_that_probes_prepares_and_calls_once(capsys):
    good, bad = FakePeer("good"), FakePeer("bad", act=raising(ValueError("no kernel")))
    assert probe.attempt(good, PROBLEM, FakeBench()) == 0
    assert probe.attempt(FakePeer("none", act=lambda: "nothing"), PROBLEM, FakeBench()) == 0
    assert probe.attempt(bad, PROBLEM, FakeBench()) == 1
    assert capsys.readouterr().err == "probe failed: ValueError: no kernel\n"


def test_a_probe_is_this_very_command(monkeypatch):
    seen = {}

    def outcome(command, environment, limit_s):
        seen.update(command=command, environment=environment, limit_s=limit_s)

    monkeypatch.setattr(probe, "outcome", outcome)
    assert probe.probe(FakePeer("quack"), PROBLEM, ["/a/bundle", "--records", "/r"], 7.0) is None
    assert seen["command"][:3] == [sys.executable, "-m", "tools.peer_benchmark"]
    options = peer_benchmark.parser().parse_args(seen["command"][3:])
    assert (options.probe, options.bundle, str(options.records)) == ("quack", "/a/bundle", "/r")
    assert json.loads(options.probe_problem) == PROBLEM.to_value()
    assert set(probe.CACHE_VARIABLES) <= set(seen["environment"])


def test_caches_are_empty_for_a_run_and_as_before_after_it(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/some/where")
    monkeypatch.delenv("QUACK_CACHE_DIR", raising=False)
    with probe.empty_caches():
        inside = {name: os.environ[name] for name in probe.CACHE_VARIABLES}
        assert len(set(inside.values())) == len(inside)
        assert not any(os.path.exists(path) for path in inside.values())
    assert os.environ["TRITON_CACHE_DIR"] == "/some/where"
    assert "QUACK_CACHE_DIR" not in os.environ


# Tables


def row_of(problem, ranked=("cublas", "quack", "gemmcache"), **us):
    cells = {name: Cell(OK, samples_us=[float(t)] * 5, mode=GRAPH, error=0.001, cold_s=1.0) for name, t in us.items()}
    return Row(problem, cells, frozenset(ranked))


BIAS = ProblemFamily.of(256, 128, epilogue="bias")
ROWS = [
    row_of(FAMILY.at(16), cublas=10, quack=8, gemmcache=5),
    row_of(FAMILY.at(64), cublas=10, gemmcache=20),
    row_of(FAMILY.at(65), cublas=30, quack=60, gemmcache=10),
    row_of(BIAS.at(128), cublas=9, quack=4.5, gemmcache=3),
]
NAMES = ["cublas", "quack", "deepgemm", "gemmcache"]


def test_the_table_of_problems():
    columns, lines = table.problem_table(ROWS, NAMES)
    assert columns == ["m", "family", "cublas", "quack", "gemmcache", "x cublas", "x best", "90 %", "best other"]
    assert lines[0] == ["16", "256x128 bfloat16", "10.00", "8.00", "5.00", "2.000", "1.600", "1.600-1.600", "quack"]
    assert lines[1][3:] == ["-", "20.00", "0.500", "0.500", "0.500-0.500", "cublas"]
    assert lines[2][5:] == ["3.000", "3.000", "3.000-3.000", "cublas"]


def test_geometric_means_are_of_what_was_measured():
    columns, lines = table.mean_table(ROWS, NAMES)
    found = {(line[0], line[1]): dict(zip(columns, line, strict=True)) for line in lines}
    assert list(found) == [("all", "m <= 64"), ("all", "all"), ("bias", "all"), ("none", "m <= 64"), ("none", "all")]
    small = found["none", "m <= 64"]
    assert small["problems"] == "2"
    assert small["gemmcache x cublas"] == "1.000 (2)"
    assert small["quack x cublas"] == "1.250 (1)"
    assert found["all", "all"]["gemmcache x best other"] == f"{geometric_mean([1.6, 0.5, 3, 1.5]):.3f} (4)"
    assert "deepgemm x cublas" not in columns


def test_the_table_of_peers():
    rows = [row_of(FAMILY.at(m), cublas=10, gemmcache=5) for m in (1, 2, 3)]
    for row, cold in zip(rows, (10.0, 1.0, 2.0), strict=True):
        row.cells["gemmcache"].cold_s = cold
        row.cells["gemmcache"].host_us = cold * 2
        row.cells["deepgemm"] = Cell(UNCOVERED, "not installed")
        row.cells["cublas"].mode = EAGER_TIMED
    rows[1].cells["gemmcache"].status, rows[1].cells["gemmcache"].detail = WRONG, "relative error 0.3"
    rows[2].cells["quack"] = Cell(FAILED, "no kernel")
    columns, lines = table.peer_table(rows, NAMES, {"gemmcache": "1.0"})
    found = {line[0]: dict(zip(columns, line, strict=True)) for line in lines}
    ours = found["gemmcache"]
    assert (ours["version"], ours["problems"]) == ("1.0", "2")
    assert (ours["cold s, first"], ours["cold s, later"], ours["cold s, sum"]) == ("10.00", "1.50", "13.0")
    assert (ours["host us"], ours["remarks"]) == ("4.0", "1 wrong (relative error 0.3)")
    assert found["deepgemm"]["remarks"] == "not installed"
    assert found["quack"]["remarks"] == "1 failed (no kernel)"
    assert found["cublas"]["remarks"] == "3 eager-timed"
    assert table.problem_table(rows, NAMES)[1][0][2] == "10.00*"


def test_samples_of_a_row_that_was_cut_off_are_not_compared():
    row = row_of(FAMILY.at(1), cublas=10, gemmcache=5)
    row.cells["cublas"].samples_us.append(10.0)
    row.failed = "interrupted"
    assert table.against_best(row) is None
    assert table.row_value(row)["x_best"] is None


def test_lines_of_progress_give_rates():
    row = row_of(ProblemFamily.of(4096, 4096).at(4096), cublas=200, gemmcache=100)
    row.cells["quack"] = Cell(TIMEOUT, "not done")
    row.cells["deepgemm"] = Cell(UNCOVERED, "not installed")
    cublas, ours, quack = table.perf_lines(row)
    assert "687 TFLOP/s" in cublas
    assert "503 GB/s" in cublas
    assert "100.00 us" in ours
    assert "2.000 x cublas" in ours
    assert quack.endswith("timeout: not done")


# The document


def test_the_document_lists_every_peer_and_says_the_numbers_of_the_code():
    pytest.importorskip("torch")
    text = (ROOT / "docs" / "peer-benchmark.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)
    assert rows == [peer.name for peer in peer_benchmark.all_peers(None, None)]
    options = peer_benchmark.parser().format_help()
    named = set(re.findall(r"--[a-z][a-z-]+", text))
    assert named
    assert [option for option in named if option not in options] == []
    said = " ".join(text.split())
    for number in (
        f"`--limit` seconds ({Settings().limit_s:.0f})",
        f"exit code 5 after {watchdog.GRACE_SECONDS:.0f} seconds more",
        f"relative error of {Settings().max_error}",
    ):
        assert number in said
    assert MAX_TIMEOUTS == 2
    assert MeasurementPolicy().max_error_milli / 1000 == Settings().max_error


# The command line


def options_of(*words):
    return peer_benchmark.parser().parse_args(list(words))


def measured(tmp_path, *words, peers=None, problems=(PROBLEM,), bench=None):
    """(exit code, stdout, the JSON file) of a run on a fake device."""
    path = tmp_path / "found.json"
    options = options_of("--rounds", "3", "--json", str(path), *words)
    out = io.StringIO()
    with redirect_stdout(out):
        code = peer_benchmark.measure(
            options,
            peers or [FakePeer("cublas", 10.0), FakePeer("gemmcache", 5.0)],
            problems,
            lambda problem: bench or FakeBench(),
            ENVIRONMENT.to_value(),
            None,
        )
    return code, out.getvalue(), json.loads(path.read_text())


def test_a_run_prints_tables_and_keeps_every_sample(tmp_path, capsys):
    problems = [FAMILY.at(m) for m in (1, 128)]
    code, out, value = measured(tmp_path, problems=problems)
    assert code == 0
    assert out.count("2.000") >= 4
    assert "note of gemmcache" in capsys.readouterr().err
    assert [row["text"] for row in value["rows"]] == [str(p) for p in problems]
    ours = value["rows"][0]["peers"]["gemmcache"]
    assert (ours["samples_us"], ours["status"], ours["x_cublas"], ours["host_us"]) == ([5.0] * 3, "ok", 2.0, 2.5)
    assert value["rows"][0]["x_best"] == {"x": 2.0, "low": 2.0, "high": 2.0, "other": "cublas"}
    assert value["environment"]["target"] == ENVIRONMENT.to_value()["target"]
    assert value["left_out"] == []


def test_what_the_budget_left_out_is_named(tmp_path):
    slow = FakePeer("cublas", act=lambda: time.sleep(0.2))
    code, out, value = measured(tmp_path, "--budget", "0.3", peers=[slow], problems=[FAMILY.at(m) for m in (1, 2, 3)])
    assert code == 0
    assert value["left_out"] == [str(FAMILY.at(2)), str(FAMILY.at(3))]
    assert f"  {FAMILY.at(3)}" in out
    assert "budget" in value["stopped"]


def test_findings_are_ours_only(tmp_path):
    fine = FakePeer("cublas")
    assert measured(tmp_path, peers=[fine, FakePeer("quack", act=raising(ValueError("no")))])[0] == 0
    assert measured(tmp_path, peers=[fine, FakePeer("gemmcache", act=raising(ValueError("no")))])[0] == 1
    assert measured(tmp_path, bench=FakeBench(errors={"gemmcache": 0.5}))[0] == 1
    assert measured(tmp_path, bench=FakeBench(errors={"cublas": 0.5}))[0] == 0
    assert measured(tmp_path, peers=[FakePeer("cublas", act=raising(ValueError("no")))])[0] == 1
    assert measured(tmp_path, peers=[fine, FakePeer("gemmcache", absent="no bundle given")])[0] == 0


def test_an_interrupted_run_prints_what_there_is(tmp_path, capsys):
    calls = itertools.count()
    peer = FakePeer("cublas", act=lambda: raising(KeyboardInterrupt())() if next(calls) else None)
    code, out, value = measured(tmp_path, peers=[peer], problems=[FAMILY.at(m) for m in (1, 2, 3)])
    assert code == 130
    assert "10.00" in out
    assert [row["failed"] for row in value["rows"]] == ["", "interrupted"]
    assert value["left_out"] == [str(FAMILY.at(3))]
    assert "interrupted" in capsys.readouterr().err


def test_problems_come_from_a_list_or_from_the_bundle(tmp_path):
    path = tmp_path / "list.json"
    fp8 = {"n": 256, "k": 128, "dtype": "fp8", "out": "bf16", "epilogue": "scale_row_column", "m": 3}
    path.write_text(json.dumps([{"n": 256, "k": 128, "ms": "1..4"}, fp8]))
    found = peer_benchmark.problems_of(options_of("--problems", str(path)))
    assert [p.m for p in found] == [1, 2, 4, 3]
    assert str(found[-1].family) == "256x128 float8_e4m3fn->bfloat16 scale_row_column"
    found = peer_benchmark.problems_of(options_of("--problems", str(path), "--m", "7", "--only", "float8"))
    assert [(p.m, p.family.a_dtype) for p in found] == [(7, "float8_e4m3fn")]

    def of_bundle(path):
        assert path == "some/bundle"
        return [FAMILY.at(1), FAMILY.at(2), BIAS.at(1)]

    assert len(peer_benchmark.problems_of(options_of("some/bundle"), of_bundle)) == 3
    found = peer_benchmark.problems_of(options_of("some/bundle", "--m", "5,6"), of_bundle)
    assert found == [FAMILY.at(5), FAMILY.at(6), BIAS.at(5), BIAS.at(6)]


@pytest.mark.parametrize("words", [[], ["some/bundle", "--only", "nowhere"], ["--problems", "/nowhere"]])
def test_nothing_to_measure_is_a_usage_error(words):
    with pytest.raises(UsageError):
        peer_benchmark.problems_of(options_of(*words), lambda path: [PROBLEM])


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--limit", "-1"], ["--limit", "inf"], ["--budget", "nan"]])
def test_numbers_that_make_no_sense_are_usage_errors(words, capsys):
    with pytest.raises(SystemExit) as ended:
        options_of(*words)
    assert ended.value.code == 2
    assert "positive" in capsys.readouterr().err


def test_peers_are_chosen_by_name():
    peers = [FakePeer("cublas"), FakePeer("quack"), FakePeer("gemmcache")]
    assert peer_benchmark.chosen(peers, None) == peers
    assert peer_benchmark.chosen(peers, "gemmcache, cublas") == [peers[0], peers[2]]
    with pytest.raises(UsageError, match="no peer is called 'cutlass'") as refused:
        peer_benchmark.chosen(peers, "cutlass")
    assert "quack" in refused.value.remedy


def test_every_peer_is_there_the_baseline_first_and_ours_last():
    pytest.importorskip("torch")
    names = [peer.name for peer in peer_benchmark.all_peers(None, None)]
    assert (names[0], names[-1]) == (table.BASELINE, table.OURS)
    assert len(set(names)) == len(names)


def test_records_are_read_from_a_file_or_a_folder(tmp_path):
    from gemmcache.records.interchange import write_jsonl
    from gemmcache.records.interface import LIBRARY, TuningRecord
    from tests.fakes import POLICY

    record = TuningRecord(PROBLEM, ENVIRONMENT, POLICY, LIBRARY, (), "cublas", (1.0,), "2026-12-01T00:00:00Z")
    write_jsonl(tmp_path / "some.jsonl", [record])
    assert peer_benchmark.read_records(None) is None
    assert peer_benchmark.read_records(tmp_path / "some.jsonl") == [record]
    assert peer_benchmark.read_records(tmp_path) == [record]


@pytest.mark.parametrize("script", [["-m", "tools.peer_benchmark"], [str(ROOT / "tools" / "peer_benchmark.py")]])
def test_the_command_runs_from_the_repository_and_by_its_path(script, tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "list.json"
    path.write_text('[{"n": 256, "k": 128, "ms": [1]}]')
    words = [sys.executable, *script, "--problems", str(path), "--peers", "cublas"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=60)
    assert (done.returncode, done.stdout) == (5, "")
    assert "no CUDA device" in done.stderr


def test_main_turns_errors_into_exit_codes(capsys):
    pytest.importorskip("torch")
    assert peer_benchmark.main(["--peers", "cutlass"]) == 2
    assert peer_benchmark.main(["--problems", "/nowhere"]) == 2
    assert "peer_benchmark:" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_run_on_a_device(tmp_path, capsys):
    path, found = tmp_path / "list.json", tmp_path / "found.json"
    path.write_text('[{"n": 4096, "k": 4096, "ms": [16], "epilogue": "bias+silu"}]')
    words = ["--problems", str(path), "--peers", "cublas,eager,gemmcache", "--rounds", "3", "--json", str(found)]
    assert peer_benchmark.main(words) == 0
    (row,) = json.loads(found.read_text())["rows"]
    assert row["peers"]["cublas"]["status"] == row["peers"]["eager"]["status"] == "ok"
    assert row["peers"]["gemmcache"]["detail"] == "no bundle given"
    assert "x cublas" in capsys.readouterr().err
