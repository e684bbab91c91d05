"""A code object of AMD's HSA, as a compiler links it: machine code, kernel descriptor, kernel arguments.

Source: LLVM, "User Guide for AMDGPU Backend": ELF code object, kernel descriptor for gfx90a and gfx942, metadata V5.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from fastpath.elf import Section, sections

_SYMBOL_TABLE, _NOTE, _METADATA_NOTE = 2, 7, 32


@dataclass(frozen=True)
class Argument:
    """One explicit or hidden kernel argument."""

    offset: int
    size: int
    #: As the metadata says: ``global_buffer``, ``by_value``, ``hidden_...``.
    kind: str


@dataclass(frozen=True)
class Kernel:
    """One kernel of a code object."""

    name: str
    #: Its machine code.
    text: bytes
    arguments: tuple[Argument, ...]
    argument_bytes: int
    #: LDS that the code itself declares; a launch may add to it.
    local_bytes: int
    scratch_bytes: int
    #: The descriptor's words (COMPUTE_PGM_RSRC1, 2 and 3, and kernel code properties), and preloaded argument words.
    resources: tuple[int, int, int]
    properties: int
    preloaded: tuple[int, int]


class CodeObjectError(ValueError):
    """The bytes are not a code object that this can read; the message says what is missing."""


def kernels(binary: bytes) -> dict[str, Kernel]:
    """Every kernel of a code object, by name.

    Raises:
        CodeObjectError: not an AMDGPU ELF, or without metadata.
    """
    try:
        parts = sections(binary)
    except ValueError as error:
        raise CodeObjectError(str(error)) from None
    metadata = _metadata(binary, parts)
    symbols = _symbols(binary, parts)
    found = {}
    for entry in metadata["amdhsa.kernels"]:
        name = entry[".name"]
        address, size = symbols[name]
        start = _file_offset(parts, address)
        words = struct.unpack_from("<64s", binary, _file_offset(parts, symbols[f"{name}.kd"][0]))[0]
        local, scratch, _ = struct.unpack_from("<III", words, 0)
        (entry_offset,) = struct.unpack_from("<q", words, 16)
        if symbols[f"{name}.kd"][0] + entry_offset != address:
            raise CodeObjectError(f"{name}: the descriptor's entry is not the kernel's first instruction")
        third, first, second, properties, preload = struct.unpack_from("<IIIHH", words, 44)
        found[name] = Kernel(
            name,
            binary[start : start + size],
            tuple(Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in entry.get(".args", [])),
            entry[".kernarg_segment_size"],
            local,
            scratch,
            (first, second, third),
            properties,
            (preload & 0x7F, preload >> 7),
        )
    return found


def _file_offset(parts: list[Section], address: int) -> int:
    for part in parts:
        if part.flags & 2 and part.address <= address < part.address + part.size:
            return part.offset + address - part.address
    raise CodeObjectError(f"address {address:#x} lies in no section")


def _metadata(binary: bytes, parts: list[Section]) -> dict[str, Any]:
    for part in parts:
        at = part.offset
        while part.kind == _NOTE and at < part.offset + part.size:
            name_bytes, length, note = struct.unpack_from("<III", binary, at)
            content = at + 12 + -(-name_bytes // 4) * 4
            if note == _METADATA_NOTE and binary[at + 12 : at + 18] == b"AMDGPU":
                decoded: dict[str, Any] = msgspec.msgpack.decode(binary[content : content + length])
                return decoded
            at = content + -(-length // 4) * 4
    raise CodeObjectError("no AMDGPU metadata note")


def _symbols(binary: bytes, parts: list[Section]) -> dict[str, tuple[int, int]]:
    found = {}
    for part in parts:
        if part.kind != _SYMBOL_TABLE:
            continue
        names = parts[part.link].offset
        for at in range(part.offset, part.offset + part.size, 24):
            name, _, _, _, value, length = struct.unpack_from("<IBBHQQ", binary, at)
            end = binary.index(b"\0", names + name)
            found[binary[names + name : end].decode()] = (value, length)
    return found
