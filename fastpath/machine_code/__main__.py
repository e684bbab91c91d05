"""``python -m fastpath.compiled [--target gfx942] [--only NAME] [--json OUT]``: exit status 1 on a finding."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import triton

from fastpath.machine_code.check import Report, examine
from fastpath.machine_code.code import GPU_TARGETS
from reference.files import write_atomically


def line(report: Report) -> str:
    """One line of the printed table."""
    r = report.resources
    verdict = "ok" if not report.findings else "; ".join(f"{f.rule}: {f.says}" for f in report.findings)
    counts = f"{r.registers:>4} + {r.accumulators:<3} {r.shared:>6} {r.scratch:>6} {r.occupancy:>4} {r.bound:<13}"
    return f"{report.call:<48} {report.kernel:<28} {counts} {verdict}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fastpath.compiled", description=__doc__)
    parser.add_argument("--target", choices=sorted(GPU_TARGETS), default="gfx942")
    parser.add_argument("--only", default="", help="only calls whose name contains this; several by commas")
    parser.add_argument("--json", type=Path, help="write the reports here")
    chosen = parser.parse_args(arguments)
    reports = []
    print(f"triton {triton.__version__}, {chosen.target}")
    print(f"{'call':<48} {'kernel':<28} registers  shared scratch occupancy")
    for report in examine(chosen.target, chosen.only):
        print(line(report), flush=True)
        reports.append(report)
    print(f"{len(reports)} kernels, {sum(map(bool, (report.findings for report in reports)))} with findings")
    if chosen.json:
        data = {"triton": triton.__version__, "target": chosen.target, "reports": [*map(dataclasses.asdict, reports)]}
        write_atomically(chosen.json, json.dumps(data, indent=1) + "\n")
    return 1 if any(report.findings for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
