"""What actor ranks show of an update, put together: one set of fingerprints, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def fingerprints(ranks: Sequence[RankEvidence]) -> dict[str, str]:
    """16 hex digits each for what the last update ended with and what went into it; ``ranks`` in rank order.

    ``gradients`` are those handed to the optimizer: reduced, normalised, clipped.

    Raises:
        StrettoError: ranks do not hold the same parameters, or disagree about what all of them computed.
    """
    require_alike([rank.replica for rank in ranks], "parameters")
    for name in ranks[0].alike:
        require_alike([rank.alike[name] for rank in ranks], name)
    parts = {name: combine(add_sums(rank.parts[name] for rank in ranks)) for name in ranks[0].parts}
    states = {name: digits for name, digits in parts.items() if not name.startswith("inputs.")}
    return states | ranks[0].alike | parts


def require_alike(values: Sequence[object], what: str) -> None:
    """Raises StrettoError, naming the first rank that differs from rank 0 and both values."""
    for rank, value in enumerate(values):
        if repr(value) != repr(values[0]):  # by text, so that NaN equals NaN
            raise StrettoError(
                f"actor ranks have parted: {what} of rank {rank} is {value}, of rank 0 {values[0]}; all must be the "
                "same to the bit. This is a defect of the engine or of the hardware: resume from the last checkpoint, "
                "and report it if it comes again"
            )
