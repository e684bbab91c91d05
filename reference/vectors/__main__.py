"""``python -m reference.vectors [--check]``: write the conformance vectors, or compare them with what is on disk."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reference.files import write_atomically
from reference.vectors.files import DATA, vector_files


def main(arguments: list[str] | None = None) -> int:
    """Write every file, or with ``--check`` compare; 0 if all is well, 1 if a file differs, is missing or left over."""
    parser = argparse.ArgumentParser(prog="python -m reference.vectors", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; report files that differ")
    parser.add_argument("--out", type=Path, default=DATA, help="folder (default: beside this module)")
    options = parser.parse_args(arguments)
    differing, made = [], set()
    for name, content in vector_files():
        path = options.out / name
        made.add(path)
        if path.is_file() and path.read_bytes() == content:
            continue
        differing.append(name)
        if not options.check:
            _write(path, content)
    if options.check:
        left_over = {path for path in options.out.rglob("*") if path.is_file()} - made
        differing += sorted(str(path.relative_to(options.out)) for path in left_over)
    what = "differ" if options.check else "written"
    print(f"{len(made) - 1} files and the index, {len(differing)} {what}", *differing, sep="\n  ")
    return int(bool(differing) and options.check)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


if __name__ == "__main__":
    sys.exit(main())
