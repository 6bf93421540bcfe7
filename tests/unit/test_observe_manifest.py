import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stretto.observe.hardware import PeakMemory, hardware, tree_rss
from stretto.observe.lineage import write_atomically
from stretto.observe.manifest import Manifest, git_state, read_manifest, versions
from stretto.types import StrettoError

CONFIG = {"run": {"seed": 3}, "actor": {"betas": (0.9, 0.99)}}
SOURCES = {"run.seed": "--set", "actor.betas": "default"}


def start(run_dir, **facts):
    given = {"config": CONFIG, "sources": SOURCES, "seeds": {"run": 3}, "model": {"fingerprint": "aa"}, "data": {}}
    return Manifest.start(run_dir, **given | facts)


def test_a_manifest_says_from_the_start_which_run_it_is(tmp_path):
    start(tmp_path / "run", determinism="exact")
    (session,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["sessions"]
    assert session["status"] == "running"
    assert session["config"] == {"run": {"seed": 3}, "actor": {"betas": [0.9, 0.99]}}
    assert session["sources"] == SOURCES
    assert session["seeds"] == {"run": 3}
    assert session["model"] == {"fingerprint": "aa"}
    assert session["determinism"] == "exact"
    assert session["versions"]["numpy"] == importlib.metadata.version("numpy")
    assert session["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert session["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert session["hardware"]["cores"] == psutil.cpu_count()
    assert session["hardware"]["memory_bytes"] == psutil.virtual_memory().total
    assert session["command"][0] == sys.orig_argv[0]


@pytest.mark.parametrize(("status", "cause"), [("finished", None), ("interrupted", "SIGINT"), ("failed", "disk full")])
def test_the_end_of_a_run_is_recorded_with_its_cause(tmp_path, status, cause):
    manifest = start(tmp_path)
    manifest.add(model={"tensors": 5}, parity="exact")
    manifest.finish(status, updates_done=7, cause=cause)
    (session,) = read_manifest(tmp_path)["sessions"]
    assert (session["status"], session["cause"], session["updates_done"]) == (status, cause, 7)
    assert session["wall_s"] >= 0
    assert session["started"] <= session["ended"]
    assert session["model"] == {"fingerprint": "aa", "tensors": 5}
    assert session["parity"] == "exact"


def test_a_resumed_run_appends_a_session_and_marks_one_whose_end_is_missing(tmp_path):
    start(tmp_path).finish("finished", updates_done=2)
    first = read_manifest(tmp_path)["sessions"][0]
    start(tmp_path, first_update=2)  # killed: never finished
    start(tmp_path, first_update=4).finish("finished", updates_done=6)
    sessions = read_manifest(tmp_path)["sessions"]
    assert sessions[0] == first
    assert [s["status"] for s in sessions] == ["finished", "interrupted", "finished"]
    assert "not recorded" in sessions[1]["cause"]
    assert [s["first_update"] for s in sessions] == [0, 2, 4]


@pytest.mark.parametrize("text", ["", "[]", '{"sessions"', '{"format": 99, "sessions": []}'])
def test_a_manifest_that_cannot_be_read_is_an_error_and_is_left_as_it_is(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StrettoError, match=r"manifest\.json"):
        start(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == text


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(_):
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", directory, *identity, *arguments], check=True, capture_output=True)


def test_the_commit_and_what_differs_from_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_state(package) is None
    git(tmp_path, "init")
    assert git_state(package) is None  # inside a checkout that does not track it, as a virtual environment may be
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert git_state(package) == {"commit": head, "dirty": False, "changed": []}
    (tmp_path / "notes.txt").write_text("untracked, outside of the package")
    assert not git_state(package)["dirty"]
    (package / "new.py").write_text("")
    assert git_state(package)["changed"] == ["?? package/new.py"]
    (package / "__init__.py").write_text("changed")
    assert git_state(package)["changed"] == [" M package/__init__.py", "?? package/new.py"]


def test_packages_that_are_not_installed_have_no_version(monkeypatch):
    monkeypatch.setattr("stretto.observe.manifest.PACKAGES", ("numpy", "no-such-package"))
    assert versions()["no-such-package"] is None


def test_facts_about_the_machine_do_not_load_torch():
    code = (
        "import sys\nfrom stretto.observe import manifest, trace\nfrom stretto.observe.hardware import hardware\n"
        "facts = hardware()\nassert facts['gpus'] or not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert hardware()["cores_usable"] == len(os.sched_getaffinity(0))


def test_memory_of_a_process_tree_includes_its_children():
    code = "import time; block = bytearray(200_000_000); print('ready', flush=True); time.sleep(30)"
    before = tree_rss()
    with PeakMemory(interval_s=0.05) as memory:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(0.3)
        child.kill()
        child.wait()
    assert memory.peak_rss_bytes > before + 190_000_000
    assert tree_rss(child.pid) == 0
