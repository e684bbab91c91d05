"""A process in which Triton interprets kernels: it decides so at import."""

from __future__ import annotations

import os
import subprocess
import sys
from textwrap import dedent


def in_interpreter(source: str) -> subprocess.CompletedProcess[str]:
    """Run Python source in one."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", dedent(source)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
