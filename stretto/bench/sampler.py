"""Samples of the machine beside a cell, every 500 ms, from the process that started it: ``hardware.jsonl``.

    {"type": "start", "interval_s": 0.5, "cores": 2, "gpus": [{"uuid": …, "name": …}], "gpu_told": ""}
    {"type": "sample", "time_ns": …, "own_cores": …, "other_cores": …, "steal_cores": …, "rss_bytes": …, "gpus": [
        {"uuid": …, "utilisation_percent": …, "memory_bytes": …, "power_w": …}]}

``time_ns`` is CLOCK_MONOTONIC, as in the events of a run; a sample's cores are means since the one before. Own are the
processes of the cell, other all that is busy beside them, the sampler too; steal is what the hypervisor took. What a
GPU does not tell is null; ``gpu_told`` says why none is sampled at all.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil

from stretto.bench.process_tree import Tree
from stretto.types import StrettoError

INTERVAL_S = 0.5
BUSY = ("user", "nice", "system", "irq", "softirq")
NO_GPU = "there is no GPU"


@dataclass(frozen=True, kw_only=True)
class GpuName:
    uuid: str
    name: str


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    uuid: str
    utilisation_percent: float | None
    memory_bytes: int | None
    power_w: float | None


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first line. ``gpu_told``: why no GPU is sampled; empty: all in ``gpus`` are."""

    interval_s: float
    cores: int
    gpus: tuple[GpuName, ...]
    gpu_told: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """``*_cores``: in use on average since the sample before; ``rss_bytes``: of all processes of the cell together."""

    time_ns: int
    own_cores: float
    other_cores: float
    steal_cores: float
    rss_bytes: int
    gpus: tuple[GpuSample, ...]


class Gpus(Protocol):
    """``names`` and ``told`` as in ``Start``."""

    names: tuple[GpuName, ...]
    told: str

    def sample(self) -> tuple[GpuSample, ...]: ...

    def close(self) -> None: ...


class Sampler:
    """Writes ``path`` in a thread while its ``with`` body runs, once ``watch`` has named the process of the cell.

    An error of the thread is raised at the end: a cell without samples is not one that was quiet.
    """

    def __init__(self, path: Path, interval_s: float = INTERVAL_S):
        self.path, self.interval_s = path, interval_s
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._run, args=(pid,), name="hardware", daemon=True)
        self._thread.start()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and error is None:
            raise StrettoError(f"{self.path}: the machine could not be sampled: {self._error}") from self._error

    def _run(self, pid: int) -> None:
        gpus: Gpus = NoGpus("")
        try:
            gpus = open_gpus()
            with self.path.open("w") as file:
                self._sample(pid, gpus, file.write)
        except Exception as error:  # raised where the body ends
            self._error = error
        finally:
            gpus.close()

    def _sample(self, pid: int, gpus: Gpus, write: Any) -> None:
        start = Start(interval_s=self.interval_s, cores=os.cpu_count() or 1, gpus=gpus.names, gpu_told=gpus.told)
        lines = [{"type": "start"} | asdict(start)]
        tree, machine, at_ns = Tree(pid), psutil.cpu_times(), time.monotonic_ns()
        spent_s, due_s = tree.look(), time.monotonic()
        while True:
            write("".join(json.dumps(line) + "\n" for line in lines))
            due_s, now_s = due_s + self.interval_s, time.monotonic()  # what a sample takes does not add up
            if due_s <= now_s:
                due_s = now_s + self.interval_s
            if self._stop.wait(due_s - now_s):
                return
            before, machine, then_ns, at_ns = machine, psutil.cpu_times(), at_ns, time.monotonic_ns()
            spent_before_s, spent_s = spent_s, tree.look()
            wall_s = (at_ns - then_ns) / 1e9
            own = (spent_s - spent_before_s) / wall_s
            sample = Sample(
                time_ns=at_ns,
                own_cores=round(own, 3),
                other_cores=round(max(0.0, busy_s(before, machine) / wall_s - own), 3),
                steal_cores=round((getattr(machine, "steal", 0.0) - getattr(before, "steal", 0.0)) / wall_s, 3),
                rss_bytes=tree.rss_bytes,
                gpus=gpus.sample(),
            )
            lines = [{"type": "sample"} | asdict(sample)]


def busy_s(before: Any, after: Any) -> float:
    """Core-seconds of work between two ``psutil.cpu_times``."""
    return sum(getattr(after, field, 0.0) - getattr(before, field, 0.0) for field in BUSY)


def others_cores(seconds: float) -> float:
    """Cores that anybody uses, on average over the next ``seconds``, in which this process sleeps."""
    before, begun = psutil.cpu_times(), time.monotonic()
    time.sleep(seconds)
    return busy_s(before, psutil.cpu_times()) / (time.monotonic() - begun)


def read_hardware(path: Path) -> tuple[Start, tuple[Sample, ...]]:
    """What ``Sampler`` has written; a last line that was cut short, as by a runner that was killed, is left out.

    Raises:
        StrettoError: there is no such file, or it holds something else.
    """
    try:
        text = path.read_text()
        first, *rest = text[: text.rfind("\n") + 1].splitlines()
        start = json.loads(first)
        if start.pop("type") != "start":
            raise ValueError("its first line is no start")
        names = tuple(GpuName(**gpu) for gpu in start.pop("gpus"))
        return Start(**start, gpus=names), tuple(_read_sample(json.loads(line)) for line in rest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StrettoError(f"{path} holds no samples of a machine: {error}") from None


def _read_sample(line: dict[str, Any]) -> Sample:
    if line.pop("type") != "sample":
        raise ValueError("a line is no sample")
    return Sample(**line | {"gpus": tuple(GpuSample(**gpu) for gpu in line["gpus"])})


class NoGpus:
    """Nothing is sampled, for the reason ``told``."""

    names: tuple[GpuName, ...] = ()

    def __init__(self, told: str):
        self.told = told

    def sample(self) -> tuple[GpuSample, ...]:
        return ()

    def close(self) -> None:
        pass


class NvmlGpus:
    """All GPUs of this machine, by NVML. Raises ``NVMLError`` where it does not work."""

    told = ""

    def __init__(self, nvml: Any):
        self._nvml = nvml
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._handles: Mapping[str, Any] = {nvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
        self.names: tuple[GpuName, ...] = tuple(
            GpuName(uuid=uuid, name=nvml.nvmlDeviceGetName(handle)) for uuid, handle in self._handles.items()
        )

    def sample(self) -> tuple[GpuSample, ...]:
        nvml = self._nvml
        return tuple(
            GpuSample(
                uuid=uuid,
                utilisation_percent=self._asked(lambda h: float(nvml.nvmlDeviceGetUtilizationRates(h).gpu), handle),
                memory_bytes=self._asked(lambda h: int(nvml.nvmlDeviceGetMemoryInfo(h).used), handle),
                power_w=self._asked(lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000, handle),
            )
            for uuid, handle in self._handles.items()
        )

    def _asked(self, ask: Any, handle: Any) -> Any:
        """None: this GPU does not tell it, as one that is cut in parts does not tell its utilisation."""
        try:
            return ask(handle)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        self._nvml.nvmlShutdown()


def open_gpus(device_files: Sequence[Path] | None = None) -> Gpus:
    """What samples GPUs here. ``device_files``: those of NVIDIA GPUs, if not the machine's own."""
    found = list(Path("/dev").glob("nvidia[0-9]*")) if device_files is None else device_files
    try:
        import pynvml
    except ImportError:
        return NoGpus("nvidia-ml-py is not installed: pip install 'stretto[gpu]'" if found else NO_GPU)
    try:
        gpus = NvmlGpus(pynvml)
    except pynvml.NVMLError as error:
        return NoGpus(f"NVML does not work: {error}" if found else NO_GPU)
    return gpus if gpus.names else NoGpus(NO_GPU)
