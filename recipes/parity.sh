#!/usr/bin/env bash
# `make parity`: the demo recipe under B, P, P+R and P+S, live and replayed on one and on four ranks, held against one another.
# What follows goes to `stretto parity check`. Report and curves go to runs/parity; a second call goes on where the first was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

if [ ! -f runs/digits-sft/config.json ]; then
  echo "supervised warm-start on 60 labelled images"
  stretto sft recipes/digits-sft.toml runs/digits-sft
fi
exec stretto parity check recipes/digits.toml --out runs/parity --ranks 1,4 "$@"
