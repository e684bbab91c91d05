"""`python -m tests.fastpath.primitive_digests`: write fastpath/measure/primitives.json (minutes of one core)."""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
from pathlib import Path

from fastpath.measure.primitives import BLOCK, BLOCKS, DIGESTS, FUNCTIONS
from tests.reference.exhaustive.oracle import FLAGS, compiler

SOURCE = Path(__file__).with_suffix(".c")


def main() -> None:
    """Compile, compute, write."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "digests.so"
        subprocess.run([str(compiler()), *FLAGS, str(SOURCE), "-o", str(built), "-lm"], check=True)
        library = ctypes.CDLL(str(built))
        digests = {name: [f"{_digest(library, name, block):016x}" for block in range(BLOCKS)] for name in FUNCTIONS}
    note = "sum of mixed words modulo 2^64 per block of 2^24 bit patterns; python -m tests.fastpath.primitive_digests"
    lines = [f"  {json.dumps(name)}: {json.dumps(words)}" for name, words in digests.items()]
    DIGESTS.write_text(f'{{\n "note": {json.dumps(note)},\n "digests": {{\n' + ",\n".join(lines) + "\n }\n}\n")


def _digest(library: ctypes.CDLL, name: str, block: int) -> int:
    result = ctypes.c_uint64()
    code = library.digest_block(
        name.encode(), ctypes.c_uint64(block * BLOCK), ctypes.c_uint64(BLOCK), ctypes.byref(result)
    )
    if code:
        raise ValueError(f"{SOURCE}: no function {name}")
    return result.value


if __name__ == "__main__":
    main()
