"""Run folders of the tiny model, made in this process by a real actor rank, with faults planted where it computes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import actor_case
import numpy as np
from safetensors.numpy import load_file, save_file

from stretto.actor import evidence
from stretto.actor.rank import ActorRankCore
from stretto.config import Config
from stretto.observe.metrics import FingerprintWriter, plain_line
from stretto.observe.raw import RawLog, raw_path
from stretto.schedule import loss_normaliser
from stretto.types import GroupFields, GroupRecord, Mini

Columns = dict[str, np.ndarray]
MODEL = "0123456789abcdef"


@dataclass
class Work:
    """One partition on its way through the actor, for a fault to change."""

    actor: ActorRankCore
    records: list[GroupRecord]
    payloads: dict[int, GroupFields]
    minis: list[Mini] = field(default_factory=list)

    def change(self, group: int, **fields: Any) -> None:
        self.records[group] = dataclasses.replace(self.records[group], **fields)


Fault = Callable[[Work], None]
Faults = Mapping[str, Fault]
"""At ``inputs`` (phase 1 will fetch them) and ``schedule``, and after ``phase 1``, ``phase 2`` and ``phase 3``."""


def write_run(
    folder: Path,
    updates: int = 2,
    faults: Faults | None = None,
    at: int = 1,
    metrics: Callable[..., None] | None = None,
) -> Path:
    """A run of ``updates`` partitions; ``faults`` are planted at update ``at``. ``metrics`` changes a line of it."""
    cfg = actor_case.config(run_dir=str(folder))
    actor = actor_case.core(cfg, {})
    raw, prints = RawLog(folder), FingerprintWriter(folder)
    lines = []
    for k in range(updates):
        planted = dict(faults or {}) if k == at else {}
        work = Work(actor, *actor_case.partition(k))
        actor.fetch = lambda _refs, groups, payloads=work.payloads: {g: payloads[g] for g in groups}
        line = _step(work, lambda name, work=work, planted=planted: planted.pop(name, _nothing)(work))
        assert not planted, f"no place is named {[*planted]}"
        shown = evidence.merged([actor.evidence()])
        prints.write(k, shown.fingerprints)
        raw.write(k, *shown.raw, hashes=shown.hashes)
        actor.end_partition()
        if metrics is not None and k == at:
            metrics(line)
        lines.append(json.dumps(plain_line(k, line)))
    prints.close()
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_manifest(folder, cfg)
    return folder


def _nothing(work: Work) -> None:
    pass


def _step(work: Work, reached: Callable[[str], None]) -> dict[str, float]:
    """``actor_case.run_step`` of a partition of one mini, with places for faults."""
    actor = work.actor
    reached("inputs")
    work.minis = actor_case.minis(actor.config, work.records)
    reached("schedule")
    (mini,) = work.minis
    for chunk in mini.chunks:
        actor.phase1(chunk, [work.records[g] for g in chunk.groups], None)
    reached("phase 1")
    metrics = actor.phase2(work.records)
    reached("phase 2")
    normaliser = loss_normaliser(
        work.records, actor.config.algorithm, actor.config.rollout.max_response_tokens
    )  # fmt: skip
    metrics |= actor.phase3(mini, normaliser)
    reached("phase 3")
    return metrics


def write_manifest(folder: Path, cfg: Config, **session: Any) -> None:
    """What a comparison reads of it."""
    base: dict[str, Any] = {
        "status": "finished",
        "config": cfg.model_dump(mode="json"),
        "model": {"path": "", "fingerprint": MODEL},
        "data": {"rows": 10, "fingerprint": "d1"},
        "switches": {"condition": "B"},
        "determinism": {
            "mode": "exact",
            "actor": {"device": "cpu", "torch_threads": 1},
            "rollout": {"engines": [{"torch_threads": 1}]},
        },
        "hardware": {"cpu": "a CPU", "gpus": []},
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    }
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "sessions": [base | session]}))


def copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def edit_session(run: Path, **changes: Any) -> Path:
    """Change the last session of the manifest; a mapping is merged, one level deep at a time."""
    path = run / "manifest.json"
    data = json.loads(path.read_text())
    _merge(data["sessions"][-1], changes)
    path.write_text(json.dumps(data))
    return run


def _merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value


def edit_columns(run: Path, update: int, change: Callable[[Columns], None]) -> Path:
    """Change columns of ``raw/``; fingerprints stay as they are."""
    path = raw_path(run, update)
    columns = {name: values.copy() for name, values in load_file(path).items()}
    change(columns)
    save_file(columns, path)
    return run


def edit_line(run: Path, file: str, update: int, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change one line of ``metrics.jsonl`` or ``fingerprints.jsonl``."""
    path = run / file
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[update])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def nudge(values: np.ndarray, at: int) -> None:
    """To the next float up."""
    values[at] = np.nextafter(values[at], np.inf, dtype=values.dtype)


def flip_bit(values: np.ndarray, at: int) -> None:
    """The lowest bit of an element of a contiguous float32 array."""
    values.reshape(-1).view(np.uint32)[at] ^= 1


def tuples(items: Sequence[Any], at: int, value: Any) -> tuple[Any, ...]:
    """``items`` with another value at one place."""
    return (*items[:at], value, *items[at + 1 :])
