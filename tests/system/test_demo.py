"""The demo as a user runs it, on many seeds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(6))
def test_the_demo_learns_to_read_and_add(seed, tmp_path):
    for part in ("recipes", "stretto"):
        shutil.copytree(ROOT / part, tmp_path / part)
    environment = os.environ | {
        "SEED": str(seed),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }
    script = tmp_path / "recipes" / "demo.sh"
    output = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True).stdout
    shares = re.findall(r"^exact match (?:before|after) +([\d.]+)% \(", output, re.M)
    before, after = float(shares[-2]), float(shares[-1])
    assert before <= 45, output
    assert after >= 70, output
