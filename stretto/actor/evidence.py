"""What actor ranks show of an update, put together: one set of fingerprints, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.actor.optim import STATE_KEYS
from stretto.observe.fingerprint import TensorSum, add_sums, combine
from stretto.types import StrettoError


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """One rank's view of the partition just trained.

    alike    quantity -> 16 hex digits: of what every rank computed in full
    replica  16 hex digits for the parameters that this rank computes with; empty for a world of one
    parts    quantity -> hashes that add up over ranks: of the tensors that the rank owns, or of its samples
    raw      columns of the rank's samples (``observe/raw.py``)
    """

    alike: dict[str, str]
    replica: str
    parts: dict[str, dict[str, TensorSum]]
    raw: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Of the partition just trained, over all ranks.

    fingerprints  quantity -> 16 hex digits
    hashes        ``parameters``, ``gradients`` and ``optimizer`` -> name of a tensor -> its hash, in order of names;
                  those of an optimizer that has not stepped yet are 0
    raw           columns of each rank's samples (``observe/raw.py``)
    """

    fingerprints: dict[str, str]
    hashes: dict[str, dict[str, int]]
    raw: list[dict[str, np.ndarray]]


def merged(ranks: Sequence[RankEvidence]) -> Evidence:
    """What ``ranks``, in rank order, show of the last update: what it ended with and what went into it.

    ``gradients`` are those handed to the optimizer: reduced, normalised, clipped.

    Raises:
        StrettoError: ranks do not hold the same parameters, or disagree about what all of them computed.
    """
    require_alike([rank.replica for rank in ranks], "parameters")
    for name in ranks[0].alike:
        require_alike([rank.alike[name] for rank in ranks], name)
    sums = {name: add_sums(rank.parts[name] for rank in ranks) for name in ranks[0].parts}
    parts = {name: combine(whole) for name, whole in sums.items()}
    states = {name: digits for name, digits in parts.items() if not name.startswith("inputs.")}
    return Evidence(
        fingerprints=states | ranks[0].alike | parts, hashes=_hashes(sums), raw=[rank.raw for rank in ranks]
    )


def _hashes(sums: Mapping[str, Mapping[str, TensorSum]]) -> dict[str, dict[str, int]]:
    names = sorted(sums["parameters"])
    of = {
        "parameters": names,
        "gradients": names,
        "optimizer": [f"{name}.{key}" for name in names for key in STATE_KEYS],
    }
    return {
        kind: {name: sums[kind][name].value if name in sums[kind] else 0 for name in wanted}
        for kind, wanted in of.items()
    }


def require_alike(values: Sequence[object], what: str) -> None:
    """Raises StrettoError, naming the first rank that differs from rank 0 and both values."""
    for rank, value in enumerate(values):
        if repr(value) != repr(values[0]):  # by text, so that NaN equals NaN
            raise StrettoError(
                f"actor ranks have parted: {what} of rank {rank} is {value}, of rank 0 {values[0]}; all must be the "
                "same to the bit. This is a defect of the engine or of the hardware: resume from the last checkpoint, "
                "and report it if it comes again"
            )
