"""A process that another one starts is never left without it, however often that one is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import stretto
from stretto import child

SLOW = """
import signal, sys, time
from pathlib import Path
def end(*_):
    time.sleep(0.6)
    Path("cleaned").touch()
    sys.exit()
signal.signal(signal.SIGINT, end)
Path("began").touch()
time.sleep(60)
"""
STARTS_IT = """
import os, signal, subprocess, sys
from pathlib import Path
from stretto import child, stops
stops.SAME_PRESS_S = 0.01
stops.STOPS.install()
real, started = subprocess.Popen, []
def popen(*args, **options):
    started.append(real(*args, **options))
    if "early" in sys.argv:
        os.kill(os.getpid(), signal.SIGINT)
    return started[-1]
subprocess.Popen = popen
try:
    child.run_logged([sys.executable, "slow.py"], Path("log"))
except KeyboardInterrupt:
    print("interrupted", started[0].poll() is not None, Path("cleaned").exists())
"""


def starts_it(root: Path, *words: str) -> subprocess.Popen:
    (root / "slow.py").write_text(SLOW)
    (root / "starts.py").write_text(STARTS_IT)
    environment = os.environ | {"PYTHONPATH": str(Path(stretto.__file__).parents[1])}
    command = [sys.executable, "starts.py", *words]
    return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_second_interrupt_does_not_leave_it_alone(tmp_path):
    process = starts_it(tmp_path)
    end = time.monotonic() + 30
    while not (tmp_path / "began").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert output == "interrupted True True\n"


def test_an_interrupt_as_it_starts_does_not_leave_it_alone(tmp_path):
    output, _ = starts_it(tmp_path, "early").communicate(timeout=30)
    assert output.startswith("interrupted True")


def test_a_child_that_ignores_sigint_is_asked_by_sigterm_before_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "ENDS_WITHIN_S", {signal.SIGINT: 0.2, signal.SIGTERM: 10.0})
    program = (
        "import signal, sys, time, pathlib; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); pathlib.Path('began').touch(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    child.end(process)
    assert process.returncode == 7
