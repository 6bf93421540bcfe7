#!/usr/bin/env bash
# Writes the versions installed in .venv to requirements/lock.txt, and those in .venv-vllm, where there is one, to
# requirements/lock-vllm-cpu.txt. For every machine: without the build tags of one (torch==2.13.0, not 2.13.0+cpu; pip
# takes either for it) and without GPU libraries, which follow from torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock() {
    {
        echo "# The versions that Stretto is tested with; constraints for pip. Made by \`make lock\`."
        "$1/bin/python" -m pip freeze --exclude-editable --disable-pip-version-check |
            sed -E 's/\+[a-z0-9.]+$//' | grep -vE '^(nvidia-|triton|cuda-)| @ ' | LC_ALL=C sort -f
    } >"$2.new"
    mv "$2.new" "$2"
}

lock .venv requirements/lock.txt
if [[ -e .venv-vllm/.complete ]]; then
    lock .venv-vllm requirements/lock-vllm-cpu.txt
fi
