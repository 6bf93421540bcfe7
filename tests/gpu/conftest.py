"""Cases and runs shared with the unit and the system tests; every test here needs a CUDA device."""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in ("unit", "system"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))
