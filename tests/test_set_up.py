"""What is fetched: pinned and hashed, all of it by `make setup`, and nothing into the system without a question."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tools import lock

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
FETCHES = ("pip install", "setup.sh", "install-clang.sh", "resolve_model")


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_requirement_is_one_version_of_known_digest(path: Path) -> None:
    text = path.read_text().replace(" \\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines and len(lines) == len(lock.pins(path.read_text()))
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", line), line


def test_every_lock_file_is_installed_with_its_digests() -> None:
    """Whatever installs requirements asks for digests, and every lock file is installed by something."""
    scripts = [ROOT / "Makefile", ROOT / "tools/setup.sh"]
    commands = [
        line for path in scripts for line in path.read_text().splitlines() if re.search(r"\binstall\b.* -r ", line)
    ]
    assert len(commands) == 3 and all("--require-hashes" in line and "--no-deps" in line for line in commands)
    said = "".join(path.read_text() for path in scripts)
    assert all(f"requirements/{path.name}" in said for path in LOCKS)


def test_this_environment_is_the_locked_one() -> None:
    """Versions; a local part (+cpu) is another build of the same release."""
    for path in LOCKS:
        for pin in lock.pins(path.read_text()) if path.stem != "triton-3.6" else []:
            name, _, wanted = pin.partition("==")
            try:
                found = version(name)
            except PackageNotFoundError:
                pytest.fail(f"{pin} of {path.name} is not installed")
            assert found.partition("+")[0] == wanted, f"{name} {found}, locked {wanted}"


def test_digests_are_written_beside_their_pins() -> None:
    found = {"b-b": ("2", "11"), "a": ("1", "22")}
    written = lock.locked("# Why.\nB_b==2 \\\n    --hash=sha256:00\na==1\n", found)
    assert written == "# Why.\nB_b==2 \\\n    --hash=sha256:11\na==1 \\\n    --hash=sha256:22\n"
    assert lock.locked(written, found) == written


def planned(folder: Path, target: str) -> str:
    """What make would run for a target."""
    command = ["make", "-n", "--no-print-directory", target]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_after_make_setup_nothing_is_fetched(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements", "tools"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    fresh = planned(tmp_path, "setup")
    assert all(fetch in fresh for fetch in FETCHES)
    for stamp in (".rlk-set-up", ".rlk-clang", ".rlk-model", "triton-3.6.0"):
        path = tmp_path / ".venv" / stamp
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for target in ("setup", "localize", "test", "test-exhaustive", "test-gfx942", "nightly", "bench-localize"):
        assert not [fetch for fetch in FETCHES if fetch in planned(tmp_path, target)], target


@pytest.mark.parametrize(("given", "asked"), [("", False), ("no", False), ("yes", True)])
def test_apt_is_not_used_without_a_yes(given: str, asked: bool, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    stubs = {"apt-get": f'echo "$@" >> {tmp_path}/apt-get', "sudo": '[ "$1" = -n ] && shift\nexec "$@"'}
    for name, body in stubs.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    for name in ("bash", "id", "true"):
        (tools / name).symlink_to(shutil.which(name) or "")
    environment = {"PATH": str(tools), "RLK_APT": given}
    script = str(ROOT / "tools/install-clang.sh")
    done = subprocess.run(
        ["bash", script], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert (tmp_path / "apt-get").exists() is asked, done.stdout
    assert asked or "RLK_APT=yes make clang" in done.stdout
