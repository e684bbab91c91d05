"""Write the SHA-256 of every wheel into the lock files: ``python -m tools.lock requirements/dev.txt ...``

Each file lists ``name==version``; pip says which wheel it would take for each on this platform, and the wheel's digest.
Nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from reference.files import write_atomically

_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s\\;]+)")


def pins(text: str) -> list[str]:
    """``name==version`` of every requirement of a lock file, in its order."""
    return [match[0] for line in text.splitlines() if (match := _PIN.match(line))]


def digests(chosen: list[str]) -> dict[str, tuple[str, str]]:
    """Name -> version and SHA-256 of the wheel that pip would install.

    Raises:
        subprocess.CalledProcessError: pip finds no wheel for one of them; it has said which.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--dry-run"]
        subprocess.run([*command, "--only-binary", ":all:", "--report", str(report), *chosen], check=True)
        found = json.loads(report.read_text())["install"]
    return {
        _canonical(item["metadata"]["name"]): (
            item["metadata"]["version"],
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in found
    }


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(text: str, found: dict[str, tuple[str, str]]) -> str:
    """The lock file with the digests of ``found``; comments stay."""
    lines = []
    for line in text.splitlines():
        if match := _PIN.match(line):
            lines += [f"{match[0]} \\", f"    --hash=sha256:{found[_canonical(match[1])][1]}"]
        elif not line.startswith("    --hash="):
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.lock", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        text = path.read_text()
        write_atomically(path, locked(text, digests(pins(text))))
        print(f"{path}: {len(pins(text))} pins")


if __name__ == "__main__":
    main()
