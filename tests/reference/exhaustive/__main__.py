"""`python -m tests.reference.exhaustive`: run, resume, and tabulate the exhaustive checks."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import mpmath
import numpy as np

from tests.reference.exhaustive.oracle import FLAGS, compiler
from tests.reference.exhaustive.runner import RESULTS, SHARDS, Shard, run, sources_digest, stored
from tests.reference.exhaustive.subjects import SUBJECTS, Outcome


def main() -> int:
    """Run what is missing, print progress, optionally write the table; 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference.exhaustive", description=__doc__)
    parser.add_argument("--only", default="", help="run the subjects whose name contains this")
    parser.add_argument("--table", type=Path, help="write the results found so far to this Markdown file")
    parser.add_argument("--no-run", action="store_true", help="only tabulate")
    arguments = parser.parse_args()
    failed = False
    if not arguments.no_run:
        for subject in (name for name in SUBJECTS if arguments.only in name):
            total = Outcome()
            for shard in run(subject):
                total.merge(shard.outcome)
                print(f"\r{subject}: {shard.shard + 1}/{SHARDS}", end="", flush=True)
            print(f"\r{subject}: {total.inputs} inputs, {total.mismatches} differ, {_accuracy(total)}", flush=True)
            failed |= total.mismatches > 0
    if arguments.table:
        arguments.table.write_text(table())
    return int(failed)


def table() -> str:
    """The results on disk as Markdown, complete subjects only."""
    rows, missing, seconds = [], [], 0.0
    for subject in SUBJECTS:
        digest = sources_digest(subject)
        shards = [stored(subject, shard, digest, RESULTS) for shard in range(SHARDS)]
        done = [shard for shard in shards if shard is not None]
        if len(done) < SHARDS:
            missing.append(subject)
            continue
        rows.append(_row(subject, done))
        seconds += sum(shard.seconds for shard in done)
    versions = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    return "\n".join(
        [
            "# Exhaustive checks of casts and primitives",
            "",
            "Every float32 bit pattern through the NumPy reference and through a second implementation in C",
            "(`tests/reference/exhaustive/oracle.c`): casts in integers, primitives with the machine's `fmaf`.",
            "`differ` counts bit patterns that are not equal. Errors are in units in the last place of the exact",
            "value, against the C library in double precision. `peer` is ml_dtypes, or NumPy for float16.",
            "",
            f"- command: `python -m tests.reference.exhaustive`, {len(rows)} of {len(SUBJECTS)} subjects complete",
            f"- time: {seconds / 60:.0f} minutes of one core on {platform.machine()}, {_processor()}, shared",
            f"- versions: Python {platform.python_version()}, NumPy {np.__version__},"
            f" ml_dtypes {ml_dtypes.__version__}, mpmath {mpmath.__version__}, {versions.splitlines()[0]}",
            f"- oracle: `gcc {' '.join(FLAGS)}`",
            f"- code: SHA-256 `{sources_digest('cast/')[:16]}` (casts), `{sources_digest('exp/rlk')[:16]}` (`exp/rlk`)",
            "",
            "| subject | inputs | differ | largest error (ulp) | at | not correctly rounded | seconds |",
            "|---|---:|---:|---:|---|---:|---:|",
            *rows,
            "",
            *([f"Not complete yet: {', '.join(missing)}.", ""] if missing else []),
        ]
    )


def _row(subject: str, shards: list[Shard]) -> str:
    total = Outcome()
    for shard in shards:
        total.merge(shard.outcome)
    seconds = sum(shard.seconds for shard in shards)
    worst = "" if total.worst_ulp is None else f"{total.worst_ulp:.4f}"
    misrounded = "" if total.misrounded is None else f"{total.misrounded:,} of {total.measured:,}"
    at = f"`{total.worst_x}`" if total.worst_x else ""
    return f"| {subject} | {total.inputs:,} | {total.mismatches:,} | {worst} | {at} | {misrounded} | {seconds:.0f} |"


def _accuracy(total: Outcome) -> str:
    return "no accuracy" if total.worst_ulp is None else f"at most {total.worst_ulp:.4f} ulp at {total.worst_x}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    return next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), "")


if __name__ == "__main__":
    sys.exit(main())
