"""``python -m fastpath.conformance [--json OUT] [--only NAME] [--jobs N]``: 0 if every bit agrees, 1 if not."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fastpath.conformance.frame import run
from reference.files import write_atomically


def main() -> int:
    """Run, print one line a case, write the report."""
    parser = argparse.ArgumentParser(prog="python -m fastpath.conformance", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--only", default="", help="only cases whose name starts with this; several by commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes; compiling is most of the time")
    arguments = parser.parse_args()

    def save(report: dict[str, Any]) -> None:
        if arguments.json is not None:
            write_atomically(arguments.json, json.dumps(report, indent=1) + "\n")

    report = run(arguments.only, arguments.jobs, lambda line: print(line, flush=True), save=save)
    summary = report["summary"]
    print(f"{summary['passed']} of {summary['cases']} cases passed")
    print(f"{summary['different']} of {summary['compared']} values differ")
    save(report)
    return 0 if summary["cases"] and summary["passed"] == summary["cases"] else 1


if __name__ == "__main__":
    sys.exit(main())
