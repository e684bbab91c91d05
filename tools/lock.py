"""Write the SHA-256 of every wheel into the lock files: ``python -m tools.lock requirements/dev.txt ...``

Each file lists ``name==version``; pip says which wheel it would take for each on this platform, and the wheel's digest
from the index, and nothing is installed. ``--also NAME`` takes PyPI's digest too, where the configured index has
another build of the same version (torch: the CPU's build, and PyPI's).
"""

from __future__ import annotations

import argparse
import json
import os
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


def digests(chosen: list[str], environment: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Name -> version and SHA-256 of the wheel that pip would install.

    Raises:
        subprocess.CalledProcessError: pip finds no wheel for one of them; it has said which.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--dry-run"]
        subprocess.run(
            [*command, "--only-binary", ":all:", "--report", str(report), *chosen], env=environment, check=True
        )
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


def locked(text: str, found: list[dict[str, tuple[str, str]]]) -> str:
    """The lock file with the digests of ``found``, one set an index; comments stay."""
    lines = []
    for line in text.splitlines():
        if match := _PIN.match(line):
            every = dict.fromkeys(of[_canonical(match[1])][1] for of in found if _canonical(match[1]) in of)
            lines.append(" \\\n    ".join([match[0], *(f"--hash=sha256:{digest}" for digest in every)]))
        elif not line.startswith("    --hash="):
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.lock", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--also", action="append", default=[], metavar="NAME", help="pins that PyPI builds otherwise")
    chosen = parser.parse_args()
    # Without the indexes and folders that are configured here.
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") or k == "PIP_CERT"}
    for path in chosen.files:
        text = path.read_text()
        found = [digests(pins(text), dict(os.environ))]
        others = [pin for pin in pins(text) if pin.partition("==")[0] in chosen.also]
        if others:
            found.append(digests(others, {**plain, "PIP_CONFIG_FILE": os.devnull}))
        write_atomically(path, locked(text, found))
        print(f"{path}: {len(pins(text))} pins")


if __name__ == "__main__":
    main()
