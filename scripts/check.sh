#!/usr/bin/env bash
# The static checks, the one list that make, CI and pre-commit share.
#
#   scripts/check.sh              all of them
#   scripts/check.sh lint types   those named; see "checks" below
#
# Runs every check asked for and exits 1 if any failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

checks=(lint format types compile shell whitespace)

# Tracked shell scripts: by name, or by their first line.
shell_scripts() {
    git ls-files -z | while IFS= read -r -d '' file; do
        [[ -f $file ]] || continue
        if [[ $file == *.sh ]] || head -c 64 "$file" | head -n 1 | grep -qaE '^#!.*\b(ba|da|)sh\b'; then
            printf '%s\0' "$file"
        fi
    done
}

lint() { ruff check --quiet .; }
format() { ruff format --check --quiet . || { echo "run: make fmt" && return 1; }; }
types() { mypy --no-error-summary; }
compile() {
    local cache status=0
    cache=$(mktemp -d)
    git ls-files -z '*.py' | PYTHONPYCACHEPREFIX=$cache xargs -0 "${PYTHON:-python}" -W error::SyntaxWarning -m compileall -q || status=1
    rm -r "$cache"
    return "$status"
}
shell() {
    shell_scripts | xargs -0 -n 1 bash -n && shell_scripts | xargs -0 shellcheck
}
whitespace() { git diff --check "$(git hash-object -t tree /dev/null)"; }

failed=()
for check in "${@:-${checks[@]}}"; do
    if [[ " ${checks[*]} " != *" $check "* ]]; then
        echo "no check is named $check; there are: ${checks[*]}" >&2
        exit 2
    fi
    if "$check"; then
        echo "$check: ok"
    else
        echo "$check: FAILED"
        failed+=("$check")
    fi
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
