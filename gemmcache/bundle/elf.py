"""As much of ELF as it takes to see what a shared object exports and which GPU images it carries.

Bounds are checked before anything is followed; whatever does not fit is an `IntegrityError`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

from gemmcache.errors import IntegrityError

MAGIC = b"\x7fELF"
#: e_machine by host arch, and of the GPU images inside.
MACHINES = {"x86_64": 62, "aarch64": 183}
GPU_MACHINE = 190

_LITTLE_64 = b"\x02\x01"
_ET_DYN, _SHT_DYNSYM, _STB_GLOBAL, _STB_WEAK = 3, 11, 1, 2
_SHT_NOBITS = 8
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_MAX_SYMBOLS = 1 << 20
_MAX_NAME = 1 << 12

Data = bytes | mmap.mmap


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of an ELF header that are needed here."""

    kind: int
    machine: int
    segments: int
    sections: int
    segment_count: int
    section_count: int


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    entry_size: int


def header(data: Data, start: int = 0) -> Header:
    """The header of the little-endian ELF64 file at `start`. Raises `IntegrityError` if there is none."""
    if start + _HEADER.size > len(data):
        raise IntegrityError("it is too short for an ELF header")
    ident, kind, machine, _, _, segments, sections, _, _, seg_size, seg_count, sec_size, sec_count, _ = (
        _HEADER.unpack_from(data, start)
    )
    if ident[:4] != MAGIC:
        raise IntegrityError("it does not begin with the magic number of ELF")
    if ident[4:6] != _LITTLE_64:
        raise IntegrityError("it is not a little-endian 64-bit ELF file")
    if (sec_count and sec_size != _SECTION.size) or (seg_count and seg_size != _SEGMENT.size):
        raise IntegrityError("its ELF tables have entries of an unknown size")
    return Header(kind, machine, segments, sections, seg_count, sec_count)


def _sections(data: Data, head: Header, start: int, end: int) -> list[_Section]:
    if start + head.sections + head.section_count * _SECTION.size > end:
        raise IntegrityError("its ELF section table lies outside of it")
    found = []
    for i in range(head.section_count):
        _, kind, _, _, offset, size, link, _, _, entry = _SECTION.unpack_from(
            data, start + head.sections + i * _SECTION.size
        )
        if kind != _SHT_NOBITS and start + offset + size > end:
            raise IntegrityError(f"its ELF section {i} lies outside of it")
        found.append(_Section(kind, offset, size, link, entry))
    return found


def exports(data: Data) -> dict[str, int]:
    """Name -> address of the dynamic symbols that the shared object `data` defines.

    Raises `IntegrityError` if it is no shared object, or its tables are broken or too large.
    """
    head = header(data)
    if head.kind != _ET_DYN:
        raise IntegrityError("it is not a shared object")
    sections = _sections(data, head, 0, len(data))
    found: dict[str, int] = {}
    for table in sections:
        if table.kind != _SHT_DYNSYM:
            continue
        if table.entry_size != _SYMBOL.size or table.link >= len(sections):
            raise IntegrityError("its ELF symbol table is malformed")
        names = sections[table.link]
        count = table.size // _SYMBOL.size
        if count > _MAX_SYMBOLS:
            raise IntegrityError(f"it has {count} dynamic symbols, more than the {_MAX_SYMBOLS} allowed")
        for i in range(count):
            name, info, _, section, address, _ = _SYMBOL.unpack_from(data, table.offset + i * _SYMBOL.size)
            if section and info >> 4 in (_STB_GLOBAL, _STB_WEAK):
                found[_name(data, names, name)] = address
    return found


def _name(data: Data, names: _Section, index: int) -> str:
    first = names.offset + index
    last = min(names.offset + names.size, first + _MAX_NAME)
    end = data.find(b"\0", first, last) if index < names.size else -1
    if end < 0:
        raise IntegrityError("an ELF symbol's name has no end")
    return data[first:end].decode("ascii", "backslashreplace")


def gpu_images(data: Data) -> list[bytes]:
    """The GPU's ELF images inside `data`, in order."""
    found = []
    at = data.find(MAGIC, 1)
    while at >= 0:
        step = 1
        try:
            head = header(data, at)
            if head.machine == GPU_MACHINE:
                end = _end_of(data, head, at)
                found.append(data[at:end])
                step = end - at
        except IntegrityError:
            # Four bytes that look like the magic number, in other data.
            pass
        at = data.find(MAGIC, at + step)
    return found


def _end_of(data: Data, head: Header, start: int) -> int:
    """Where the image at `start` ends: past its tables and all that they point to."""
    ends = [head.sections + head.section_count * _SECTION.size]
    if head.segment_count:
        ends.append(head.segments + head.segment_count * _SEGMENT.size)
    ends += [s.offset + s.size for s in _sections(data, head, start, len(data)) if s.kind != _SHT_NOBITS]
    end = start + max(ends)
    if end > len(data) or end < start + _HEADER.size:
        raise IntegrityError("a GPU image lies outside of the file")
    return end
