#!/usr/bin/env bash
# The reference launcher: trains a recipe under the condition that three environment variables name.
#
#   MM_PROCESSOR_POOL_SIZE=8 HYBRID_PIPELINE_FORWARD=1 recipes/launch.sh recipes/digits.toml --set run.dir=runs/p-s
#
#   MM_PROCESSOR_POOL_SIZE       P: processes that process prompts, 0 or more
#   HYBRID_REUSE_TRAIN_LOGPROBS  R: 1 reuses the training forward's log-probs, 0 does not
#   HYBRID_PIPELINE_FORWARD      S: 1 forwards chunks as they arrive, 0 does not
#
# What is not set is as the recipe says. What follows the recipe goes to `stretto train`. Refuses malformed values, and R with S, before anything starts.
set -euo pipefail

usage() {
  sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

refuse() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

if [ $# -eq 0 ] || [ "$1" = "-h" ] || [ "$1" = "--help" ]; then
  usage
  exit "$([ $# -eq 0 ] && echo 2 || echo 0)"
fi
recipe="$1"
shift

# A variable that is not set leaves it to the recipe; one that is set to nothing is refused.
[[ "${MM_PROCESSOR_POOL_SIZE-0}" =~ ^(0|[1-9][0-9]*)$ ]] ||
  refuse "MM_PROCESSOR_POOL_SIZE = \"$MM_PROCESSOR_POOL_SIZE\": expected an integer of at least 0, such as 8; or unset it"
[[ "${HYBRID_REUSE_TRAIN_LOGPROBS-0}" =~ ^[01]$ ]] ||
  refuse "HYBRID_REUSE_TRAIN_LOGPROBS = \"$HYBRID_REUSE_TRAIN_LOGPROBS\": expected 0 or 1; or unset it"
[[ "${HYBRID_PIPELINE_FORWARD-0}" =~ ^[01]$ ]] ||
  refuse "HYBRID_PIPELINE_FORWARD = \"$HYBRID_PIPELINE_FORWARD\": expected 0 or 1; or unset it"
if [ "${HYBRID_REUSE_TRAIN_LOGPROBS-0}" = 1 ] && [ "${HYBRID_PIPELINE_FORWARD-0}" = 1 ]; then
  refuse "HYBRID_REUSE_TRAIN_LOGPROBS = 1 and HYBRID_PIPELINE_FORWARD = 1: R leaves no old-policy forward for S to overlap, and their effects must not be conflated; switch one of them off"
fi
command -v stretto >/dev/null || refuse "there is no stretto on PATH; activate its environment, such as: source .venv/bin/activate"

exec stretto train "$recipe" "$@"
