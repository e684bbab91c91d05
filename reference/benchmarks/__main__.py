"""`python -m reference.benchmarks`: measure on one core, print a table, write JSON on request."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from reference.benchmarks import dots, elementwise, model
from reference.benchmarks.measure import Measurement
from reference.files import write_atomically

#: Suites by name.
SUITES: dict[str, Callable[[], Iterator[Measurement]]] = {
    "dots": dots.measurements,
    "elementwise": elementwise.measurements,
    "model": model.measurements,
}


def main() -> int:
    """Run the suites; 1 if a rate is below its target."""
    parser = argparse.ArgumentParser(prog="python -m reference.benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="*", default=list(SUITES), help=f"among {', '.join(SUITES)}; all by default")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.suite) - set(SUITES):
        parser.error(f"suite: {', '.join(sorted(unknown))} is unknown; choose among {', '.join(SUITES)}")
    results = []
    print(f"{'what':44} {'size':>18} {'rate':>10}  {'':8} {'target':>7} {'over peer':>16}")
    for suite in arguments.suite:
        for measurement in SUITES[suite]():
            results.append(measurement)
            print(_line(measurement), flush=True)
    if arguments.json:
        measured = {**_machine(), "measurements": [asdict(m) for m in results]}
        write_atomically(arguments.json, json.dumps(measured, indent=1) + "\n")
    return 0 if all(measurement.reaches_target for measurement in results) else 1


def _line(m: Measurement) -> str:
    target = "" if m.target is None else f"{m.target:g}" + ("" if m.reaches_target else " !")
    peer = "" if m.ratio is None else f"{m.ratio:.1f}x {m.peer}"
    return f"{m.name:44} {m.size:>18} {m.rate:10.2f}  {m.unit:8} {target:>7} {peer:>16}"


def _machine() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": models[0] if models else platform.processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "time": "rates are per second of processor time, one thread",
    }


if __name__ == "__main__":
    sys.exit(main())
