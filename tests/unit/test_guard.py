"""What the guard of a killed run takes for its processes."""

from __future__ import annotations

import os
import subprocess
import sys

from stretto import guard


def test_processes_are_known_by_their_command_line_or_their_environment_and_no_others_are(tmp_path):
    folder, other = str(tmp_path / "ray"), str(tmp_path / "ray-of-another-run")
    plain = {name: value for name, value in os.environ.items() if name != guard.MARK}
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    started = [
        subprocess.Popen([*sleep, folder], env=plain, stdout=subprocess.PIPE),
        # Some of Ray's processes overwrite their command line with a title.
        subprocess.Popen(sleep, env=plain | {guard.MARK: folder}, stdout=subprocess.PIPE),
        subprocess.Popen(sleep, env=plain | {guard.MARK: other}, stdout=subprocess.PIPE),
        subprocess.Popen(sleep, env=plain, stdout=subprocess.PIPE),
    ]
    try:
        for process in started:
            process.stdout.readline()
        assert sorted(guard.left_over(folder)) == sorted(process.pid for process in started[:2])
    finally:
        for process in started:
            process.kill()
            process.communicate()
