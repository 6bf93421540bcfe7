#!/usr/bin/env bash
# `make demo`: warm-start, hybrid-async GRPO, and a test on images that were never used for choosing anything.
# SEED (default 0) is the seed of everything; results go to runs/demo-SEED.
set -euo pipefail
cd "$(dirname "$0")/.."
seed="${SEED:-0}"
out="runs/demo-$seed"
if [ -e "$out" ]; then
  mv "$out" "$out.$(date +%Y%m%d-%H%M%S)"
fi
mkdir -p "$out"
export OMP_NUM_THREADS=1

echo "1/4 supervised warm-start on 60 labelled images"
stretto sft recipes/digits-sft.toml "$out/sft" --set "run.seed=$seed"

echo "2/4 test before"
stretto eval recipes/digits.toml --model "$out/sft" | tee "$out/before.txt"

echo "3/4 hybrid-async GRPO"
stretto train recipes/digits.toml --set "run.seed=$seed" --set "model.path=$out/sft" --set "run.dir=$out/grpo"

echo "4/4 test after"
stretto export "$out/grpo" "$out/model"
stretto eval recipes/digits.toml --model "$out/model" | tee "$out/after.txt"

match() { sed -n 's/^exact match *//p' "$1"; }
echo
echo "exact match before  $(match "$out/before.txt")"
echo "exact match after   $(match "$out/after.txt")"
echo "metrics, trace, checkpoints in $out/grpo; the model in $out/model"
