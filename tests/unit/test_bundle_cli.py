"""`gemmcache verify` and `gemmcache inspect`, and what cuobjdump tells them."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gemmcache.bundle import elf, resources
from gemmcache.bundle.interface import LIBRARY, PREDICTED, Blob, Entry
from gemmcache.bundle.writer import publish
from gemmcache.cli.app import run
from gemmcache.errors import EXIT_INTEGRITY, EXIT_OK, EXIT_USAGE, ToolError
from tests.strategies_bundle import bundle, digest_of, published, shared_object


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    published(tmp_path / "b")
    return tmp_path / "b"


def gpu_image(content: bytes) -> bytes:
    """The least that an ELF image for the GPU is: a header, and one section with `content`."""
    ident = b"\x7fELF\x02\x01\x01\x41\x08".ljust(16, b"\0")
    sections = 64 + len(content)
    head = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, elf.GPU_MACHINE, 1, 0, 0, sections, 0, 64, 0, 0, 64, 1, 0)
    return head + content + struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 64, len(content), 0, 0, 1, 0)


def carrier(symbols: tuple[str, ...], images: list[bytes]) -> bytes:
    """A shared object of `symbols` that carries `images`, as compiled kernels do."""
    arrays = (f"const unsigned char i{n}[] = {{{','.join(map(str, data))}}};" for n, data in enumerate(images))
    return shared_object(symbols, 'const char fake[] = "\\177ELF but not really";' + "".join(arrays))


#: Takes the last byte of the image's content for the number of registers.
FAKE_TOOL = """#!{python}
import sys
assert sys.argv[1] == "--dump-resource-usage"
registers = open(sys.argv[2], "rb").read()[-65]
if registers == 255:
    sys.exit("broken image")
print(f"Resource usage:\\n Common:\\n  GLOBAL:0\\n Function kernel_{{registers}}:")
print(f"  REG:{{registers}} STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:1164 TEXTURE:0 SURFACE:0 SAMPLER:0")
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin/cuobjdump"
    path.parent.mkdir()
    path.write_text(FAKE_TOOL.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(resources, "PACKAGE", "gemmcache-has-no-such-package")
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    return path


def test_verify_says_ok(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(folder)]) == EXIT_OK
    assert capsys.readouterr().out.rstrip().endswith("ok")
    assert run(["verify", str(folder), "--json"]) == EXIT_OK
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is True
    assert [b["digest"] for b in value["blobs"]] == [b.digest for b in bundle()[0].blobs]


def test_verify_ends_with_the_code_of_integrity(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blob = folder / "blobs" / bundle()[0].blobs[0].digest
    blob.write_bytes(blob.read_bytes()[::-1])
    assert run(["verify", str(folder)]) == EXIT_INTEGRITY
    assert blob.name in capsys.readouterr().err
    (folder / "stray\x1b[2J").write_text("x")
    assert run(["verify", str(folder)]) == EXIT_INTEGRITY
    text = capsys.readouterr()
    assert "stray" in text.err
    assert "\x1b" not in text.out + text.err
    assert run(["verify", str(folder), "--json"]) == EXIT_INTEGRITY
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_verify_of_nothing_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "inspect"):
        assert run([command, str(tmp_path)]) == EXIT_USAGE
        assert "not a bundle" in capsys.readouterr().err


def test_inspect_shows_what_serves_which_m(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    for wanted in (
        "NVIDIA H200 (sm_90a, 132 SMs)",
        "NVIDIA B200 (sm_100a, 148 SMs)",
        "x86_64 x86-64-v3 gnu",
        "580.159.03",
        "operators[salt=0 tile=128x256]",
        "4096x4096 bfloat16 bias+gelu_tanh (x1)",
        "ab" * 32,
        *(k.function for p in bundle()[0].parts for k in p.kernels),
    ):
        assert wanted in text
    rows = [line.split() for line in text.splitlines()]
    assert ["9..16", "kernel", "tuned", "26.50", "28.00", "0.00170", "operators[salt=0", "tile=128x256]"] in rows
    assert ["1", "library", "tuned", "11.50", "13.00", "0.00170"] in rows


def test_inspect_json_has_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    manifest = bundle()[0]
    assert value["digest"] == digest_of(manifest.encode())
    assert value["blob_bytes"] == sum(b.size for b in manifest.blobs)
    for part, shown in zip(manifest.parts, value["parts"], strict=True):
        assert shown["target"] == part.target.to_value()
        assert shown["toolchain"] == part.toolchain.to_value()
        assert [k["function"] for k in shown["kernels"]] == [k.function for k in part.kernels]
        assert sorted(k["entries"] for k in shown["kernels"]) == [1, 2]
        for table, other in zip(part.tables, shown["tables"], strict=True):
            assert other["family_digest"] == table.family.digest
            assert [(e["first_m"], e["last_m"]) for e in other["entries"]] == list(table.ladder.steps())
            assert [{k: e[k] for k in f.to_value()} for e, f in zip(other["entries"], table.entries, strict=True)] == [
                f.to_value() for f in table.entries
            ]


def test_inspect_of_a_bundle_of_library_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = bundle()[0]
    part = manifest.parts[0]
    table = replace(part.tables[0], entries=(Entry(8, LIBRARY, PREDICTED),))
    part = replace(part, blob=None, kernels=(), tables=(table,), driver=None)
    publish(tmp_path / "b", replace(manifest, parts=(part,), name="[bold]x\x1b[2J"), {})
    assert run(["inspect", str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "the library serves everything" in text
    assert "[bold]x\\x1b[2J version 1" in text
    assert ["5..8", "library", "predicted"] in [line.split() for line in text.splitlines()]


def _with_images(folder: Path, registers: list[int]) -> list[str]:
    """Publishes a bundle whose blob carries an image for each of `registers`; symbols in the blob's order."""
    manifest, _ = bundle()
    part = manifest.parts[0]
    symbols = tuple(reversed([k.symbol for k in part.kernels]))
    data = carrier(symbols, [gpu_image(bytes([1, 2, 3, n])) for n in registers])
    part = replace(part, blob=Blob(digest_of(data), len(data)))
    publish(folder, replace(manifest, parts=(part,)), {digest_of(data): data})
    return list(symbols)


def test_registers_are_shown_for_the_kernel_they_are_of(
    tmp_path: Path, tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    symbols = _with_images(tmp_path / "b", [168, 232])
    assert run(["inspect", str(tmp_path / "b"), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    found = {k["symbol"]: k["resources"] for k in value["parts"][0]["kernels"]}
    for symbol, registers in zip(symbols, (168, 232), strict=True):
        assert found[symbol] == [
            {"gpu_function": f"kernel_{registers}", "registers": registers, "stack": 8, "shared": 1024, "local": 0}
        ]
    assert not value["notes"]
    assert run(["inspect", str(tmp_path / "b")]) == 0
    assert ["232", "8", "1024"] in [line.split()[-3:] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("registers", "text"), [([168], "not one GPU image"), ([1, 255], "broken image")])
def test_unknown_registers_are_a_note(
    tmp_path: Path, tool: Path, capsys: pytest.CaptureFixture[str], registers: list[int], text: str
) -> None:
    _with_images(tmp_path / "b", registers)
    assert run(["inspect", str(tmp_path / "b"), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert text in value["notes"][0]
    assert all(k["resources"] is None for k in value["parts"][0]["kernels"])


def test_inspect_works_without_cuobjdump(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resources, "find_cuobjdump", lambda: None)
    assert run(["inspect", str(folder)]) == 0
    assert "pip install nvidia-cuda-cuobjdump" in capsys.readouterr().err


def test_the_tool_that_can_not_be_run_is_a_tool_error(tmp_path: Path) -> None:
    (tmp_path / "cuobjdump").write_text("no program")
    with pytest.raises(ToolError, match="can't be run"):
        resources.image_usage(b"", tmp_path / "cuobjdump")


def test_images_are_cut_out_whole() -> None:
    images = [gpu_image(b"a" * 100), gpu_image(b"\x7fELF" * 20)]
    assert elf.gpu_images(carrier(("f",), images)) == images
