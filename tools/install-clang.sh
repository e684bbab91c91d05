#!/usr/bin/env bash
# Debian's clang-19 and lld-19, which compile HIP C++ for gfx942 without ROCm. Skips with a reason where it cannot.
set -euo pipefail
say() { printf '\033[1m[clang]\033[0m %s\n' "$*"; }

if command -v clang-19 >/dev/null && command -v ld.lld-19 >/dev/null; then
  say "clang-19 and lld-19 are installed"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  say "skipped: no apt-get here; install clang 19 and lld 19 by hand to check the HIP sources"
  exit 0
fi
run=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
    say "skipped: needs root; run: sudo apt-get install clang-19 lld-19"
    exit 0
  fi
  run=(sudo)
fi
# Nothing is installed into a system that nobody was asked about.
answer=${RLK_APT:-}
if [ -z "$answer" ] && [ -t 0 ] && [ -t 1 ]; then
  read -r -p "[clang] install clang-19 and lld-19 with apt-get, for the tests of the HIP sources? [y/N] " answer
fi
case "$answer" in
  y | Y | yes) ;;
  *)
    say "skipped: nothing was installed; RLK_APT=yes make clang installs clang-19 and lld-19 with apt-get"
    exit 0
    ;;
esac
say "installing clang-19 and lld-19"
{ "${run[@]}" apt-get update -q && "${run[@]}" apt-get install -y -q --no-install-recommends clang-19 lld-19; } >/dev/null ||
  say "skipped: apt-get could not install clang-19; tests of the HIP sources will say so"
