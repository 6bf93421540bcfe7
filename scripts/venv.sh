#!/usr/bin/env bash
# Makes .venv with the pinned dependencies. May be interrupted and run again.
#
# PYTHON and TORCH_INDEX are described in the Makefile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
cpu_index=https://download.pytorch.org/whl/cpu
lock=requirements/lock.txt

say() { printf '%s\n' "$*" >&2; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    found=$("$python" --version 2>/dev/null || true)
    say "PYTHON=$python (${found:-does not run}): Stretto needs Python 3.11 or later; name one, as in: make venv PYTHON=python3.12"
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    say "PYTHON=$python has no venv module: install it (on Debian and Ubuntu: apt-get install python3-venv)"
    exit 1
fi

# An interrupted installation can leave packages that pip takes for whole, so an unfinished environment starts afresh.
if [[ -e .venv/.unfinished ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi
touch .venv/.unfinished
rm -f .venv/.complete

if [[ -z ${TORCH_INDEX+set} ]]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        TORCH_INDEX=
        say "a GPU is there: torch comes from the plain registry (a CUDA build of several GB)"
    elif timeout 6 .venv/bin/python -c "import urllib.request as r; r.urlopen('$cpu_index/torch/', timeout=5)" 2>/dev/null; then
        TORCH_INDEX=$cpu_index
        say "no GPU: torch comes from $TORCH_INDEX"
    else
        TORCH_INDEX=
        say "$cpu_index can not be reached: torch comes from the plain registry, often as a CUDA build of several GB; TORCH_INDEX=URL names another index"
    fi
fi

pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint "$lock")
if [[ -n $TORCH_INDEX ]]; then
    # Alone, since that index holds little else; what torch needs comes from the plain registry with the rest.
    "${pip[@]}" --no-deps --index-url "$TORCH_INDEX" torch
fi
say "installing the packages of $lock; this takes a few minutes the first time"
"${pip[@]}" --editable '.[dev]'

rm .venv/.unfinished
touch .venv/.complete
say "ready: .venv ($(.venv/bin/python -c 'import sys; from importlib.metadata import version as v
print(f"Python {sys.version.split()[0]}, torch {v('"'torch'"')}, transformers {v('"'transformers'"')}, ray {v('"'ray'"')}")'))"
