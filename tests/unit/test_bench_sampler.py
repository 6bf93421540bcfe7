"""Hardware samples of a cell: the CPU time of a tree that changes, the file and its reader, GPUs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import types
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from stretto.bench.process_tree import Seen, Tree, lost_s
from stretto.bench.sampler import NO_GPU, Sampler, open_gpus, others_cores, read_hardware
from stretto.types import StrettoError


def seen(pid: int, parent: int, own_s: float, reaped_s: float = 0.0, rss: int = 1) -> dict[int, Seen]:
    return {pid: Seen((pid, float(pid)), parent, own_s, reaped_s, rss)}


def total_after(*looks: dict[int, Seen]) -> float:
    tree = Tree(1)
    for look in looks:
        tree.update(look)
    return tree.total_s


ROOT = seen(1, 0, 2.0)
OTHERS = seen(90, 0, 1000.0)


def test_only_the_root_and_what_descends_from_it_counts():
    tree = Tree(1)
    tree.update(ROOT | seen(2, 1, 3.0, rss=10) | seen(3, 2, 4.0, rss=100) | OTHERS)
    assert tree.total_s == 2 + 3 + 4
    assert tree.rss_bytes == 111


def test_a_child_whose_end_its_parent_has_noted_counts_once():
    # It used 3.0 s when it was last seen and 3.5 s in all: the parent's sum has all of it.
    assert total_after(ROOT | seen(2, 1, 3.0), seen(1, 0, 2.0, reaped_s=3.5)) == 5.5


def test_a_child_that_came_and_went_between_two_looks_counts():
    assert total_after(ROOT, seen(1, 0, 2.0, reaped_s=0.7)) == 2.7


def test_a_child_whose_parent_takes_no_note_is_not_forgotten():
    assert total_after(ROOT | seen(2, 1, 3.0), ROOT) == 5.0


def test_an_orphan_stays_in_the_tree_and_its_end_is_not_forgotten():
    whole = ROOT | seen(2, 1, 3.0) | seen(3, 2, 4.0)
    orphaned = seen(1, 0, 2.0, reaped_s=3.0) | seen(3, 90, 6.0) | OTHERS
    assert total_after(whole, orphaned) == 2 + 3 + 6
    assert total_after(whole, orphaned, seen(1, 0, 2.0, reaped_s=3.0) | OTHERS) == 2 + 3 + 6


def test_what_a_child_had_noted_passes_to_the_parent_that_notes_its_end():
    before = ROOT | seen(2, 1, 3.0) | seen(3, 2, 4.0)
    assert total_after(before, seen(1, 0, 2.0, reaped_s=7.0)) == 9.0
    keyed = {one.key: one for one in before.values()}
    left = {one.key: one for one in seen(1, 0, 2.0, reaped_s=1.0).values()}
    assert lost_s(keyed, left) == 6.0


def test_an_id_that_is_given_out_again_is_another_process():
    again = {2: Seen((2, 99.0), 90, 50.0, 0.0, 1)}
    assert total_after(ROOT | seen(2, 1, 3.0), ROOT | again | OTHERS) == 5.0


BURN = """
import os, subprocess, sys, time
if len(sys.argv) > 1:
    end = time.process_time() + float(sys.argv[1])
    while time.process_time() < end: pass
    raise SystemExit
for _ in range(5):
    subprocess.run([sys.executable, "-S", __file__, "0.1"])
"""


def test_processes_that_live_for_less_than_a_sample_are_counted(tmp_path):
    (tmp_path / "burn.py").write_text(BURN)
    path = tmp_path / "hardware.jsonl"
    before = os.times()
    with Sampler(path, interval_s=0.25) as sampler:
        process = subprocess.Popen([sys.executable, str(tmp_path / "burn.py")])
        sampler.watch(process.pid)
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:  # not reaped: its sums can still be read
            time.sleep(0.05)
        time.sleep(0.4)
    process.wait()
    after = os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    start, samples = read_hardware(path)
    assert start.interval_s == 0.25 and start.cores == os.cpu_count()
    times = [sample.time_ns for sample in samples]
    seconds = [0.25, *((b - a) / 1e9 for a, b in pairwise(times))]
    measured_s = sum(s.own_cores * dt for s, dt in zip(samples, seconds, strict=True))
    assert used_s > 0.5
    assert measured_s == pytest.approx(used_s, abs=0.25)  # before the first look some 0.1 s may be used
    assert statistics.median(seconds) == pytest.approx(0.25, abs=0.1)
    assert max(sample.rss_bytes for sample in samples) > 5e6


LINES = [
    {"type": "start", "interval_s": 0.5, "cores": 2, "gpus": [{"uuid": "GPU-1", "name": "A"}], "gpu_told": ""},
    {
        "type": "sample",
        "time_ns": 7,
        "own_cores": 1.5,
        "other_cores": 0.25,
        "steal_cores": 0.0,
        "rss_bytes": 9,
        "gpus": [{"uuid": "GPU-1", "utilisation_percent": None, "memory_bytes": 5, "power_w": 70.5}],
    },
]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_is_read_up_to_a_last_line_that_was_cut(tmp_path):
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    start, samples = read_hardware(write(tmp_path / "hardware.jsonl", text + json.dumps(LINES[1])[:40]))
    assert [gpu.uuid for gpu in start.gpus] == ["GPU-1"]
    (sample,) = samples
    assert (sample.own_cores, sample.other_cores, sample.rss_bytes) == (1.5, 0.25, 9)
    assert (sample.gpus[0].utilisation_percent, sample.gpus[0].power_w) == (None, 70.5)


@pytest.mark.parametrize("text", ["", "{}\n", "no\n", json.dumps(LINES[1]) + "\n", '{"type": "start"}\n'])
def test_another_file_is_refused_by_name(tmp_path, text):
    with pytest.raises(StrettoError, match=r"h\.jsonl holds no samples"):
        read_hardware(write(tmp_path / "h.jsonl", text))
    with pytest.raises(StrettoError, match=r"none\.jsonl holds no samples"):
        read_hardware(tmp_path / "none.jsonl")


def test_a_busy_machine_is_seen():
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        assert others_cores(0.5) > 0.4
    finally:
        burner.kill()
        burner.wait()


# GPUs: there is none where these run, so NVML's calls are stood in for; the names are those of nvidia-ml-py.


class NVMLError(Exception):
    pass


def nvml(count: int = 1, fails: str = "", utilisation: bool = True) -> types.ModuleType:
    module = types.ModuleType("pynvml")

    def refuse(*_: object) -> None:
        raise NVMLError(fails or "Not Supported")

    rates, memory = types.SimpleNamespace(gpu=37), types.SimpleNamespace(used=2**30)
    calls = {
        "nvmlInit": refuse if fails else lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda handle: "Some GPU",
        "nvmlDeviceGetUtilizationRates": (lambda handle: rates) if utilisation else refuse,
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetPowerUsage": lambda handle: 250_500,
        "NVMLError": NVMLError,
    }
    for name, value in calls.items():
        setattr(module, name, value)
    return module


DEVICE = [Path("/dev/nvidia0")]


def test_gpus_are_sampled_by_uuid_and_what_one_does_not_tell_is_null(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(count=2))
    gpus = open_gpus(DEVICE)
    assert [gpu.uuid for gpu in gpus.names] == ["GPU-0", "GPU-1"] and gpus.told == ""
    sample = gpus.sample()[1]
    assert (sample.uuid, sample.utilisation_percent, sample.memory_bytes, sample.power_w) == ("GPU-1", 37, 2**30, 250.5)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(utilisation=False))
    (sample,) = open_gpus(DEVICE).sample()
    assert sample.utilisation_percent is None and sample.memory_bytes == 2**30


def test_why_no_gpu_is_sampled_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert open_gpus([]).told == NO_GPU
    assert "pip install 'stretto[gpu]'" in open_gpus(DEVICE).told
    monkeypatch.setitem(sys.modules, "pynvml", nvml(fails="Driver Not Loaded"))
    assert open_gpus(DEVICE).told == "NVML does not work: Driver Not Loaded"
    assert open_gpus([]).told == NO_GPU
    monkeypatch.setitem(sys.modules, "pynvml", nvml(count=0))
    assert open_gpus(DEVICE).told == NO_GPU


def test_what_opening_gpus_raises_is_an_error_of_the_cell(monkeypatch, tmp_path):
    def broken(device_files: object = None) -> None:
        raise OSError("a library is half there")

    monkeypatch.setattr("stretto.bench.sampler.open_gpus", broken)
    told = "could not be sampled: a library is half there"
    with pytest.raises(StrettoError, match=told), Sampler(tmp_path / "hardware.jsonl") as sampler:
        sampler.watch(os.getpid())
