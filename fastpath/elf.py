"""What of an ELF file is code: its identity must not depend on where the source lay when it was compiled."""

from __future__ import annotations

import struct
from dataclasses import dataclass

#: Sections that say where code came from, and tables whose content is found in the others.
_NOT_CODE = (".debug", ".nv_debug", ".comment", ".strtab", ".shstrtab", ".symtab", ".rel.debug", ".rela.debug", ".line")
_EMPTY_IN_FILE = 8


@dataclass(frozen=True)
class Section:
    """One section: name, type, flags, address when loaded, where it lies in the file, its link to another."""

    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int

    def content(self, binary: bytes) -> bytes:
        """Its bytes; none of a section that the file does not hold."""
        return b"" if self.kind == _EMPTY_IN_FILE else binary[self.offset : self.offset + self.size]


def sections(binary: bytes) -> list[Section]:
    """Every section of a 64-bit little-endian ELF file.

    Raises:
        ValueError: it is none.
    """
    if binary[:6] != b"\x7fELF\x02\x01" or len(binary) < 64:
        raise ValueError("not a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", binary, 0x28)
    count, names_at = struct.unpack_from("<HH", binary, 0x3C)
    rows = [struct.unpack_from("<IIQQQQI", binary, offset + 64 * i) for i in range(count)]
    names = rows[names_at][4]
    found = []
    for name, kind, flags, address, at, size, link in rows:
        end = binary.index(b"\0", names + name)
        found.append(Section(binary[names + name : end].decode(), kind, flags, address, at, size, link))
    return found


def code_of(binary: bytes) -> bytes:
    """The sections that a device loads or a driver reads, with their names: the same for one source in two folders."""
    if binary[:4] != b"\x7fELF":
        return binary  # the interpreter's source text
    kept = (section for section in sections(binary) if section.name and not section.name.startswith(_NOT_CODE))
    return b"".join(
        section.name.encode() + b"\0" + len(content := section.content(binary)).to_bytes(8, "little") + content
        for section in kept
    )
