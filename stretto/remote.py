"""What both sides' Ray actors share."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from stretto.plane.ray_plane import cause_of, unwrapped
from stretto.types import StrettoError


def memory_mib() -> float:
    """Resident memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def answers(refs: Iterable[Any], side: str) -> list[Any]:
    """Results of remote calls; errors as their own, without Ray's wrapping.

    Raises:
        StrettoError: raised there, or the process died.
    """
    try:
        return ray.get(list(refs))
    except RayTaskError as error:
        raise unwrapped(error) from None
    except OutOfMemoryError as error:
        cause = str(error).splitlines()[0]
        raise StrettoError(
            f"the {side} process was ended by Ray because this machine ran out of memory ({cause}); free some or lower "
            "rollout.prompts_per_partition or actor.max_tokens_per_microbatch, then resume from the last checkpoint"
        ) from None
    except RayActorError as error:
        raise StrettoError(f"the {side} process died: {cause_of(error)}; resume from the last checkpoint") from None
