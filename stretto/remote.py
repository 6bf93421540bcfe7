"""What both sides' Ray actors share."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from stretto.plane.ray_plane import cause_of, unwrapped
from stretto.types import CollectiveError, StrettoError

GRACE_S = 10.0
"""How long the cause is waited for once a process says that it has lost its siblings: Ray takes a second or two to
notice that a process is gone."""


def memory_mib() -> float:
    """Resident memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def answers(refs: Iterable[Any], side: str | Sequence[str]) -> list[Any]:
    """Results of remote calls, in order; errors as their own, without Ray's wrapping.

    ``side``: what the processes are called in errors, one name for all or one each. The first call that fails ends the
    wait, since others may never come back: they wait for the one that failed. Its error is raised, unless it is the
    mere consequence of another's (``CollectiveError``), which then is.

    Raises:
        StrettoError: raised there, or the process died.
    """
    calls = list(refs)
    names = dict(zip(calls, [side] * len(calls) if isinstance(side, str) else side, strict=True))
    pending = calls
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        error = failure(done[0], names[done[0]])
        if isinstance(error, CollectiveError):
            error = _cause(pending, names) or error
        if error is not None:
            raise error from None
    return ray.get(calls)


def settled(refs: Iterable[Any], side: str | Sequence[str]) -> list[Any]:
    """As ``answers``, but returns or raises only once all calls have ended. For calls that wait for no other."""
    calls = list(refs)
    ray.wait(calls, num_returns=len(calls))
    return answers(calls, side)


def _cause(pending: Sequence[Any], names: dict[Any, str]) -> BaseException | None:
    """The first error of ``pending`` calls that is no CollectiveError, if one comes within the grace."""
    left, deadline = list(pending), time.monotonic() + GRACE_S
    while left and (rest := deadline - time.monotonic()) > 0:
        done, left = ray.wait(left, num_returns=1, timeout=rest)
        for ref in done:
            error = failure(ref, names[ref])
            if error is not None and not isinstance(error, CollectiveError):
                return error
    return None


def failure(ref: Any, name: str) -> BaseException | None:
    """What a call that has ended raised, in our own words; None where it returned a value."""
    try:
        ray.get(ref)
    except RayTaskError as error:
        return unwrapped(error)
    except OutOfMemoryError as error:
        cause = str(error).splitlines()[0]
        return StrettoError(
            f"the {name} process was ended by Ray because this machine ran out of memory ({cause}); free some or lower "
            "rollout.prompts_per_partition or actor.max_tokens_per_microbatch, then resume from the last checkpoint"
        )
    except RayActorError as error:
        return StrettoError(f"the {name} process died: {cause_of(error)}; resume from the last checkpoint")
    return None
