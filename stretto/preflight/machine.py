"""What this machine gives: cores, GPUs, libraries, limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from stretto import machine as placing
from stretto.config import Config
from stretto.machine_checks import engine_library, is_local_path, machine_cores, ranges
from stretto.preflight.case import Case, Caution, Fact, Line, problems_of
from stretto.types import ConfigError

LIBRARIES = ("torch", "transformers", "ray")
CROWDED = 2
"""Processes of one core above which the warning says what they cost."""
OPEN_FILES = 4096
"""Files that Ray's processes may need at once on a small machine; Ray raises the soft limit itself."""


def machine(case: Case) -> Iterator[Line]:
    config = case.config
    if config.cluster.address:
        yield Fact(f"cluster at {config.cluster.address}: its machines can not be seen from here")
    else:
        missing = list(machine_cores(config, case.reader))
        yield from missing
        if not missing and case.training:
            yield from _placed(config)
    yield from engine_library(config, case.reader)
    if case.thorough:
        yield from _libraries()
        yield from _open_files()
        yield from _home(config)


def _placed(config: Config) -> Iterator[Line]:
    try:
        place = placing.placement(config)
    except ConfigError as error:
        yield from problems_of(error, "cluster.device", "cluster.actor_cores", "cluster.rollout_cores")
        return
    import torch

    usable = os.sched_getaffinity(0)
    ranks, replicas = config.actor.data_parallel, config.rollout.replicas
    actor, rollout = place.actor_cores, place.rollout_cores
    yield Fact(
        f"{len(usable)} cores usable ({ranges(usable)}): actor {ranges(set(actor))}, rollout {ranges(set(rollout))}; "
        f"device {place.device}"
    )
    if place.note and torch.cuda.device_count():  # without any GPU nobody expects one to be used
        yield Caution(place.note)
    if place.device == "cuda":
        engines = placing.engine_gpus(config)
        yield Fact(f"{ranks + engines} GPUs in use: {_count(ranks, 'actor rank')}, {_count(engines, 'engine')}")
        return
    sides = (("actor", "actor.data_parallel", ranks, actor), ("rollout", "rollout.replicas", replicas, rollout))
    for side, name, count, cores in sides:
        if count > len(cores):
            yield Caution(
                f"{name} = {count} on {_count(len(cores), 'core')} ({ranges(set(cores))}): they share "
                f"{'it' if len(cores) == 1 else 'them'} and take turns rather than run at once"
                f"{', each with memory of its own' if count > CROWDED * len(cores) else ''}; lower it to {len(cores)}, "
                f"or give that side {count} cores (cluster.{side}_cores)"
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _libraries() -> Iterator[Line]:
    """Against the ranges that the package itself was installed with."""
    try:
        required = [Requirement(text) for text in metadata.requires("stretto") or ()]
    except metadata.PackageNotFoundError:  # run from its source, never installed
        return
    ranges_of = {r.name: r.specifier for r in required if r.name in LIBRARIES and r.marker is None}
    found = {name: metadata.version(name) for name in ranges_of}
    yield Fact(", ".join(f"{name} {version}" for name, version in found.items()))
    for name, version in found.items():
        if not ranges_of[name].contains(version, prereleases=True):
            yield Caution(
                f"{name} {version} is none of the versions that are tested ({ranges_of[name]}); "
                f'pip install "{name}{ranges_of[name]}"'
            )


def _open_files() -> Iterator[Line]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES:
        return
    yield Caution(
        f"this process may open {hard} files (ulimit -Hn), and Ray may need {OPEN_FILES}; raise the limit "
        "(limits.conf, docker run --ulimit nofile=65536)"
    )


def _home(config: Config) -> Iterator[Line]:
    home = Path.home()
    if os.access(home, os.W_OK | os.X_OK):
        return
    hub = config.model.path and not is_local_path(config.model.path)
    why = "models of the hub are kept there" if hub else "libraries keep caches there"
    yield Caution(f"the home folder {home} can not be written to, and {why}; set HOME to a folder that can")
