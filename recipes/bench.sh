#!/usr/bin/env bash
# `make bench`: what P, R and S are worth on this machine's cores, from warm-start to report (about an hour on two cores that do nothing else).
# PLAN (default recipes/bench/cpu-ablation.toml) is the plan. Runs and report go to runs/bench/<its name>; a second call goes on where the first was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
plan="${PLAN:-recipes/bench/cpu-ablation.toml}"
export OMP_NUM_THREADS=1

if [ ! -f runs/digits-sft/config.json ]; then
  echo "supervised warm-start on 60 labelled images"
  stretto sft recipes/digits-sft.toml runs/digits-sft
fi
if [ ! -f runs/bench-digits/train.jsonl ]; then
  python recipes/make_digit_files.py runs/bench-digits --scale 12
fi
stretto bench run "$plan"
stretto bench report "runs/bench/$(sed -n 's/^name = "\(.*\)"$/\1/p' "$plan")"
