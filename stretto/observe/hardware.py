"""Facts about the machine, and the memory of a process tree. Nothing here decides anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any


def read_first_line(path: str) -> str | None:
    """The first line of a file of the kernel or the system; None where there is none."""
    try:
        return Path(path).read_text().split("\n", 1)[0].strip() or None
    except OSError:
        return None


def machine_id() -> str | None:
    return read_first_line("/etc/machine-id")


def boot_id() -> str | None:
    """Changes with every boot; times of CLOCK_MONOTONIC compare only within one."""
    return read_first_line("/proc/sys/kernel/random/boot_id")


def cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def memory_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cgroup_limits() -> dict[str, float | int | None]:
    """``cores`` and ``memory_bytes`` that a container may use; None: no limit is set, or it cannot be read."""
    quota, _, period = (read_first_line("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    memory = read_first_line("/sys/fs/cgroup/memory.max") or "max"
    return {
        "cores": int(quota) / int(period) if quota.isdigit() and period.isdigit() else None,
        "memory_bytes": int(memory) if memory.isdigit() else None,
    }


def gpus() -> list[dict[str, Any]]:
    """``index, name, uuid, memory_bytes, driver`` of every GPU, by nvidia-smi or else by torch; empty: none found."""
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        query = "index,name,uuid,memory.total,driver_version"
        command = [smi, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if found.returncode == 0:
            return [_parse_smi(line) for line in found.stdout.splitlines() if line.strip()]
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return []  # importing torch takes seconds, and would find none
    try:
        import torch
    except ImportError:
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [_torch_gpu(i, torch.cuda.get_device_properties(i)) for i in range(count)]


def _torch_gpu(index: int, properties: Any) -> dict[str, Any]:
    uuid = str(getattr(properties, "uuid", "")) or None
    return {
        "index": index,
        "name": properties.name,
        "uuid": uuid,
        "memory_bytes": properties.total_memory,
        "driver": None,
    }


def _parse_smi(line: str) -> dict[str, Any]:
    index, name, uuid, mib, driver = (part.strip() for part in line.split(","))
    memory = int(mib) * 2**20 if mib.isdigit() else None
    return {"index": int(index), "name": name, "uuid": uuid, "memory_bytes": memory, "driver": driver}


def hardware() -> dict[str, Any]:
    """What the manifest says about the machine."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "cgroup": cgroup_limits(),
        "gpus": gpus(),
    }


def tree_rss(pid: int | None = None) -> int:
    """Resident bytes of a process and all of its descendants, now (default: this process).

    Pages that processes share count once for each of them.
    """
    import psutil

    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:  # ended since it was listed
            continue
    return total


class PeakMemory:
    """Samples ``tree_rss`` in a thread while its ``with`` body runs; ``peak_rss_bytes`` holds the largest.

    A sample costs a few milliseconds for ten processes. A peak between two samples is missed.
    """

    def __init__(self, pid: int | None = None, interval_s: float = 1.0):
        self.peak_rss_bytes = 0
        self._pid, self._interval_s = pid, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss(self._pid))
            if self._stop.wait(self._interval_s):
                return
