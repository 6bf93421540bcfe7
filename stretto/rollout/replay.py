"""A rollout engine and rewards that give what a recording holds.

The prompts come from the recording, too, and are processed anew (inline or in the pool): the engine holds what the
processor made of them against what was recorded, bit for bit, before it hands out a response.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stretto.recording import RecordedGroup, RecordedPrompt, Recording
from stretto.rollout.engine import GroupRequest, Sampling, Weights
from stretto.types import ProcessedPrompt, Prompt, Response, Score, StrettoError

CHECKED = ("prompt_ids", "mm_token_type_ids", "image_grid_thw", "pixel_values")
"""What the processor makes of a prompt; small ones first, since they say more where all of them differ."""


class ReplayEngine:
    """The ``Engine`` of a replay. It takes every version that it is given and uses none: responses keep the stamps of
    the recording. With ``paced`` a call takes as long as its decode batch took when it was recorded; where a call joins
    groups of other batches, its share of each.
    """

    fixed_batches = True
    batch_invariant = True
    live_update = False
    concurrency = 1

    def __init__(self, recording: Recording, *, paced: bool):
        self.recording = recording
        self.paced = paced
        self._version = -1

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> Mapping[str, Any]:
        return {}

    async def load_weights(self, version: int, weights: Weights) -> None:
        self._version = version

    async def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Response]]:
        """Raises StrettoError where a processed prompt is not the recorded one; see ``check_prompt``."""
        begun = time.monotonic()
        groups = await asyncio.to_thread(self._recorded, requests)
        if self.paced:
            await asyncio.sleep(self._decode_s(groups) - (time.monotonic() - begun))
        return [group.responses for group in groups]

    def _recorded(self, requests: Sequence[GroupRequest]) -> list[RecordedGroup]:
        groups = [self.recording.group(request.partition, request.group) for request in requests]
        for request, group in zip(requests, groups, strict=True):
            check_prompt(request.prompt, group)
        return groups

    def _decode_s(self, groups: Sequence[RecordedGroup]) -> float:
        taken = Counter((group.record.partition, group.timing.batch) for group in groups)
        total_s = 0.0
        for (partition, batch), count in taken.items():
            decode_s, of = self.recording.batches(partition)[batch]
            total_s += decode_s * count / of
        return total_s

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass


class RecordedRewards:
    """The scores of a recording, for the prompts of ``data.recorded``; with ``paced`` after as long as they took."""

    def __init__(self, recording: Recording, *, paced: bool):
        self.recording = recording
        self.paced = paced

    async def start(self) -> None:
        pass

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        if not isinstance(prompt, RecordedPrompt):
            raise TypeError(f"row {prompt.row_id} is of no recording")
        scores, timing = self.recording.scores(prompt.partition, prompt.group)
        if self.paced:
            await asyncio.sleep(timing.score_s)
        return scores

    def check_partition(self, partition: int, scores: Sequence[Score]) -> None:
        """What failed was looked at when it was recorded."""

    def close(self) -> None:
        pass


def check_prompt(processed: ProcessedPrompt, group: RecordedGroup) -> None:
    """Refuse a prompt that is not the recorded one to the bit.

    Raises:
        StrettoError: names partition, group, row and tensor, and the first value that differs with both values.
    """
    record = group.record
    for name in CHECKED:
        now, then = np.asarray(getattr(processed, name)), np.asarray(group.fields[name])
        if difference := first_difference(now, then):
            raise StrettoError(
                f"partition {record.partition}, group {record.group} (row {record.row_id}): the processor makes other "
                f"{name} than were recorded: {difference}; replay with the model folder, images and package versions "
                "of the recording"
            )


def first_difference(now: np.ndarray, then: np.ndarray) -> str:
    """Where two arrays first differ, by bits, in words; empty where they do not."""
    if now.dtype != then.dtype or now.shape != then.shape:
        return f"{now.dtype} {list(now.shape)} now, {then.dtype} {list(then.shape)} then"
    differs = _bits(now) != _bits(then)
    if not differs.any():
        return ""
    at = np.unravel_index(int(differs.argmax()), now.shape)
    place = ", ".join(map(str, map(int, at)))
    return f"[{place}] is {now[at]!r} now, {then[at]!r} then; {int(differs.sum())} of {now.size} values differ"


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
