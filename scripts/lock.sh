#!/usr/bin/env bash
# Writes the versions installed in .venv to requirements/lock.txt, for every machine: without the build tags of one
# (torch==2.13.0, not 2.13.0+cpu; pip takes either for it) and without GPU libraries, which follow from torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{
    echo "# The versions that Stretto is tested with; constraints for pip. Made by \`make lock\`."
    .venv/bin/python -m pip freeze --exclude-editable --disable-pip-version-check |
        sed -E 's/\+[a-z0-9.]+$//' | grep -vE '^(nvidia-|triton|cuda-)| @ ' | LC_ALL=C sort -f
} >requirements/lock.txt.new
mv requirements/lock.txt.new requirements/lock.txt
