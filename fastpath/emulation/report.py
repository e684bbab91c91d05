"""Every kernel and schedule of the catalogue: compiled, checked by rules, executed in emulation, its bits compared."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastpath.backend import EMULATED, UnsupportedError
from fastpath.conformance import frame
from fastpath.machine_code.check import Report, examine

#: Operators whose kernels are reached by cases of other names.
_CASES = {
    "linear": ("linear", "emulated"),
    "row_linear": ("row_linear", "emulated"),
    "lm_head": ("lm_head", "emulated"),
    "lm_head_logprob": ("lm_head_logprob", "emulated"),
    "logprob": ("logprob", "logsumexp", "lm_head_logprob"),
    "all_reduce": ("all_reduce",),
}


@dataclass(frozen=True)
class Executed:
    """One kernel of the catalogue, and what its execution showed."""

    report: Report
    #: Cases that launched this very code, those of them that did not pass, values compared, how many of them differ.
    cases: int
    failed: tuple[str, ...]
    compared: int
    different: int

    @property
    def passes(self) -> bool:
        """No finding, executed at all, no value differs, and no case that launched it failed in another way."""
        return not self.report.findings and self.compared > 0 and not self.different and not self.failed


def run(
    only: str, jobs: int, say: Callable[[str], None], deadline: float | None = None
) -> tuple[dict[str, Any], Iterator[Executed]]:
    """Execute the cases that reach the chosen calls, then go through the catalogue.

    Args:
        only: calls whose name contains it (or one of several, by commas); empty for all.

    Returns:
        The report of the cases as plain data, and every kernel, one after the other.

    Raises:
        UnsupportedError: this process does not emulate: it must start with RLK_EMULATE=gfx942.
    """
    if not EMULATED:
        raise UnsupportedError("set RLK_EMULATE=gfx942 before the first import of fastpath")
    report = frame.run(_prefixes(only), jobs, say, deadline)
    return report, _kernels(report, only)


def _prefixes(only: str) -> str:
    from fastpath.machine_code.catalogue import calls

    if not only:
        return ""
    chosen = {call.name.split("/")[0] for call in calls() if any(part in call.name for part in only.split(","))}
    return (
        ",".join(sorted({f"{prefix}" for operator in chosen for prefix in _CASES.get(operator, (operator,))})) or only
    )


def _kernels(report: dict[str, Any], only: str) -> Iterator[Executed]:
    by_code: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case in report["cases"]:
        for code in {report["kernels"][name]["code_sha256"] for name in case["launches"]}:
            by_code[code].append(case)
    for found in examine(EMULATED, only):
        cases = by_code[found.code_sha256]
        failed = tuple(case["name"] for case in cases if not case["passed"])
        compared, different = (sum(case[count] for case in cases) for count in ("compared", "different"))
        yield Executed(found, len(cases), failed, compared, different)


def line(executed: Executed) -> str:
    """One line of the printed table."""
    report = executed.report
    rules = "rules ok" if not report.findings else "; ".join(f"{f.rule}: {f.says}" for f in report.findings)
    ran = f"{executed.compared:>10} executed, {executed.different} differ" if executed.compared else "NOT EXECUTED"
    if executed.failed and not executed.different:
        ran += f", FAILED in {', '.join(executed.failed)}"
    return f"{report.call:<48} {report.kernel:<28} compiled, {rules}, {ran}"


def main() -> int:
    """``RLK_EMULATE=gfx942 python -m fastpath.emulation.report``: exit status 1 on a difference or a gap."""
    import argparse
    import json
    from pathlib import Path

    import triton

    parser = argparse.ArgumentParser(prog="python -m fastpath.emulation.report", description=__doc__)
    parser.add_argument("--only", default="", help="only calls whose name contains this; several by commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write the report here")
    chosen = parser.parse_args()
    started = time.perf_counter()
    report, kernels = run(chosen.only, chosen.jobs, lambda text: print(text, flush=True))
    rows = []
    for executed in kernels:
        print(line(executed), flush=True)
        rows.append(executed)
    failing = [row for row in rows if not row.passes]
    summary = report["summary"] | {"kernels": len(rows), "failing": len(failing)}
    summary["seconds"] = round(time.perf_counter() - started)
    print(f"triton {triton.__version__}: {len(rows)} kernels, {len(failing)} failing")
    print(f"{summary['compared']} values compared, {summary['different']} differ; {summary['seconds']} s")
    if chosen.json:
        data = {
            "grade": "executed in emulation",
            "target": EMULATED,
            "triton": triton.__version__,
            "summary": summary,
            "kernels": [
                {
                    "call": row.report.call, "kernel": row.report.kernel, "code_sha256": row.report.code_sha256,
                    "findings": len(row.report.findings), "cases": row.cases, "compared": row.compared,
                    "different": row.different,
                }
                for row in rows
            ],
            "cases": {case["name"]: [case["compared"], case["different"]] for case in report["cases"]},
        }  # fmt: skip
        partial = chosen.json.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(chosen.json)
    return 1 if failing or summary["passed"] != summary["cases"] or not rows else 0


if __name__ == "__main__":
    import sys

    sys.exit(main())
