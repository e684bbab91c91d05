"""The pages of the API are made of the docstrings, without a warning and without network, and hold what is public."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rlk

ROOT = Path(__file__).parents[1]


def test_the_pages_are_built_and_hold_every_public_function(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [*command, str(ROOT / "docs/api"), str(tmp_path / "html")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html" / "rlk.html").read_text()
    assert {name for name in rlk.__all__ if f'id="rlk.{name}"' not in page} <= {"RlkError", "Verdict"}
    assert 'id="diffcheck.localize.verdict.Verdict"' in page and 'id="diffcheck.runs.RunSettings"' in page
    # A new operator has its page too.
    listed = (ROOT / "docs/api/operators.rst").read_text().split()
    operators = {path.stem for path in (ROOT / "reference/operators").glob("[a-z]*.py")}
    assert {f"reference.operators.{name}" for name in operators} == {w for w in listed if w.startswith("reference.")}
