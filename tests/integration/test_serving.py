"""Compiled bundles loaded where there is no GPU: by ranks of one job, before a fork, without the tools of builders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemmcache.bundle.reader import BundleReader
from tests.integration.commands import environment, needs_compiler, python

pytestmark = [pytest.mark.compile, needs_compiler]

#: Loads the bundle at argv[1] as a machine would that has the GPU which the bundle was made for.
LOAD = """
import json, sys
for name in ("cutlass", "diskcache", "click", "rich", "transformers", "yaml", "gemmcache.build", "gemmcache.tuning"):
    sys.modules[name] = None
import gemmcache
from gemmcache.bundle.reader import BundleReader
from gemmcache.runtime import loader
def load(path):
    with BundleReader.open(path) as reader:
        part = reader.manifest.parts[0]
    loader.detect_facts = lambda device=None: loader.part_facts(part)
    return gemmcache.load(path)
bundle = load(sys.argv[1])
"""

CHOICES = """
def said(choice):
    if choice.function is None:
        return [choice.where, None, choice.entry.m if choice.entry else None]
    return [choice.where, choice.entry.kernel, choice.entry.m]
print(json.dumps({f.digest: [said(d.choose(m)) for m in range(1, 8200)] for f, d in bundle.dispatchers.items()}))
"""


def test_every_rank_makes_the_choices_of_the_builders_table(llama, cache, tmp_path):
    """Three processes with their own hash seeds and working folders, no communication, every m."""
    ranks = []
    for rank in range(3):
        here = tmp_path / str(rank)
        here.mkdir()
        env = environment(cache, here, PYTHONHASHSEED=str(rank), RANK=str(rank), WORLD_SIZE="3")
        command = [sys.executable, "-c", LOAD + CHOICES, llama["bundle"]]
        ranks.append(
            subprocess.Popen(command, env=env, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = []
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        outputs.append(out)
    assert len(set(outputs)) == 1
    said = json.loads(outputs[0])
    with BundleReader.open(llama["bundle"]) as reader:
        tables = reader.manifest.parts[0].tables
    assert said.keys() == {t.family.digest for t in tables}
    for table in tables:
        steps = list(zip(table.entries, table.ladder.steps(), strict=True))
        expected = []
        for m in range(1, 8200):
            entry = next((e for e, (first, last) in steps if first <= m <= last), None)
            where = "inside" if entry else "above" if m > 8192 else "between"
            expected.append([where, entry.kernel if entry else None, entry.m if entry else None])
        assert said[table.family.digest] == expected


FORK = """
import os, torch
from torch.utils.data import DataLoader, Dataset
w = torch.randn(64, 32)
class Rows(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        # A worker never touches the device; what the library computes works in it as in any process.
        assert bundle._linear.forked
        torch.manual_seed(i)
        x = torch.randn(2, 32)
        return {"x": x, "y": bundle.linear(x, w), "worker": os.getpid()}
workers, rows = set(), 0
for batch in DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
    assert torch.allclose(batch["y"], batch["x"] @ w.T, atol=1e-5)
    workers |= set(batch["worker"].tolist())
    rows += len(batch["y"])
assert rows == 16 and len(workers) == 2 and os.getpid() not in workers
assert not bundle._linear.forked and bundle.counters["calls"] == 0
# Loading anew in a child is allowed: the child's own bundle serves there.
child = os.fork()
if child == 0:
    own = load(sys.argv[1])
    os._exit(0 if not own._linear.forked and bundle._linear.forked else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_data_loader_workers_forked_after_loading_are_unharmed(llama, cache, tmp_path):
    env = environment(cache, tmp_path)
    done = python(LOAD + FORK, llama["bundle"], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_loading_in_a_fork_of_a_process_that_used_cuda_says_what_to_do(llama, monkeypatch):
    """torch itself refuses the device there; the error must speak of the fork and not of the bundle."""
    import torch

    import gemmcache

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="fork"):
        gemmcache.load(llama["bundle"])


def test_a_real_bundle_serves_from_a_read_only_noexec_mount_without_home_or_temporary_folder(llama, tmp_path):
    """CPU tensors go to the library; the kernels are loaded all the same."""
    code = LOAD + "import torch\nx, w = torch.randn(3, 4096), torch.randn(6144, 4096)\n"
    code += "assert torch.equal(bundle.linear(x, w), torch.nn.functional.linear(x, w))\n"
    code += "assert sum(d.choose(m).function is not None for d in bundle.dispatchers.values() for m in range(1, 999))\n"
    (tmp_path / "serve.py").write_text(code)
    there = tmp_path / "there"
    there.mkdir()
    mount = f"mount --bind {llama['bundle']} {there} && mount -o remount,bind,ro,noexec {there}"
    space = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    try:
        able = subprocess.run([*space, mount], capture_output=True, check=False).returncode == 0
    except OSError:
        able = False
    if not able:
        pytest.skip("this machine lets nobody mount")
    env = environment(Path("/nonexistent/cache"), Path("/nonexistent/records"), TMPDIR="/nonexistent")
    env.pop("HOME", None)
    serve = f"! touch {there}/x 2>/dev/null && exec {sys.executable} -B {tmp_path}/serve.py {there}"
    done = subprocess.run(
        [*space, f"{mount} && {serve}"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
