"""Headless Chromium, where it is installed: what a page really looks like."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_PROGRAM = next((p for p in ("chromium", "chromium-browser", "google-chrome") if shutil.which(p)), None)
PHONE, DESKTOP = 390, 1280
needs_browser = pytest.mark.skipif(_PROGRAM is None, reason="no Chromium here: apt-get install chromium")


def scroll_width(page: str, width: int) -> int:
    """Width in CSS pixels that ``page`` takes in a window of ``width``: more than that means scrolling sideways.

    The page sits in a frame, where windows have no least width and its own policy against scripts still holds.
    """
    frame = f'<iframe style="width:{width}px;height:2000px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    measure = (
        "onload = () => { document.body.dataset.width ="
        " document.querySelector('iframe').contentDocument.documentElement.scrollWidth }"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frame.html"
        path.write_text(f"<!doctype html><script>{measure}</script><body>{frame}", encoding="utf-8")
        assert _PROGRAM is not None
        command = [_PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        done = subprocess.run(
            [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=60, check=False
        )
    found = re.search(r'data-width="(\d+)"', done.stdout)
    assert found, done.stderr[-2000:]
    return int(found[1])
