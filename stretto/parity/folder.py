"""A run folder as a comparison reads it: the manifest, and what is on record of each update."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from stretto.config import Config
from stretto.observe.lineage import read_lines
from stretto.observe.manifest import read_manifest
from stretto.observe.raw import raw_path, read_raw, read_tensor_names, tensors_path
from stretto.parity.verdict import RunName
from stretto.types import StrettoError


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one run has on record of one update; an empty mapping where it has nothing.

    columns  of ``raw/``
    prints   16 hex digits by quantity
    metrics  of the line of ``metrics.jsonl``
    tensors  kind (``parameters``, …) -> names, in the order of ``hash.<kind>`` in ``columns``
    n        samples per prompt group
    samples  that a partition has by the options of the run; None: not known
    """

    update: int
    columns: Mapping[str, np.ndarray]
    prints: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    n: int = 1
    samples: int | None = None


class RunFolder:
    """Reads the folder of a run.

    Raises:
        StrettoError: there is no run in ``path``, or no update of it is on record.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        sessions = read_manifest(self.path)["sessions"]
        if not sessions:
            raise StrettoError(f"{self.path / 'manifest.json'} holds no session: no run has started there")
        self.sessions: Sequence[Mapping[str, Any]] = sessions
        self.session = self.sessions[-1]
        try:
            self.config = Config.model_validate_json(json.dumps(self.session["config"]))
        except (KeyError, ValidationError) as error:
            raise StrettoError(f"{self.path / 'manifest.json'} has options that this version lacks: {error}") from None
        self._prints = _by_update(self.path / "fingerprints.jsonl")
        self._metrics = _by_update(self.path / "metrics.jsonl")
        self.updates = len(self._prints)
        """Updates on record, from 0 on."""
        if not self._prints or set(self._prints) != set(range(self.updates)):
            raise StrettoError(
                f"{self.path / 'fingerprints.jsonl'} has no unbroken row of updates from 0 on; compare runs that "
                "trained at least one update"
            )

    @property
    def name(self) -> RunName:
        return RunName(path=str(self.path), condition=self.condition, replay=self.replay)

    @property
    def condition(self) -> str:
        return str(self.session.get("switches", {}).get("condition", "?"))

    @property
    def replay(self) -> bool:
        return bool(self.config.seams.replay)

    @cached_property
    def tensors(self) -> dict[str, list[str]]:
        return read_tensor_names(self.path) if tensors_path(self.path).exists() else {}

    def update(self, k: int) -> Update:
        """Raises StrettoError where the raw values of an update are there, but cannot be read."""
        return Update(
            update=k,
            columns=read_raw(self.path, k) if raw_path(self.path, k).exists() else {},
            prints=self._prints[k],
            metrics=self._metrics.get(k, {}),
            tensors=self.tensors,
            n=self.config.rollout.n_samples_per_prompt,
            samples=self.config.rollout.prompts_per_partition * self.config.rollout.n_samples_per_prompt,
        )

    def prints(self, k: int) -> Mapping[str, Any]:
        """The line of ``fingerprints.jsonl`` of update ``k``."""
        return self._prints[k]


def _by_update(path: Path) -> dict[int, dict[str, Any]]:
    return {int(row["update"]): row for row in read_lines(path)} if path.exists() else {}
