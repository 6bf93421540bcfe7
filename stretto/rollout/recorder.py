"""Writes down what the rollout side puts into the data plane."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from stretto.recording import RecordedGroup, RecordedPrompt, Timing
from stretto.recording.writer import Writer
from stretto.rollout.finished import Finished
from stretto.types import GroupRecord, Prompt, Truncated

Originals = Callable[[Prompt], Sequence[tuple[bytes, str]]]
"""The image files of a prompt as they were given, and the format of each (``png``)."""


class Recorder:
    """Records partitions 0 … ``partitions - 1``; files are written on threads, never on the event loop.

    ``truncated`` says which tokens are to be trained. Every method raises StrettoError where nothing can be written.
    """

    def __init__(self, writer: Writer, *, partitions: int, truncated: Truncated, originals: Originals):
        self.writer = writer
        self.partitions = partitions
        self.truncated: Truncated = truncated
        self.originals = originals
        self._groups: dict[int, list[tuple[RecordedGroup, str]]] = defaultdict(list)

    async def group(self, record: GroupRecord, finished: Finished, put_s: float) -> None:
        """A group was put, ``put_s`` seconds after its partition's turn had begun."""
        if record.partition < self.partitions:
            group = await asyncio.to_thread(self._group, record, finished, put_s)
            self._groups[record.partition].append(group)

    async def partition(self, partition: int) -> None:
        """All groups of a partition were put: its file is there once this returns."""
        if partition < self.partitions:
            await asyncio.to_thread(self.writer.partition, self._groups.pop(partition))

    def _group(self, record: GroupRecord, finished: Finished, put_s: float) -> tuple[RecordedGroup, str]:
        """The group without its pixels, which are written at once, and the name of their file."""
        made = finished.generated
        prompt, processed = made.prompt, made.processed
        images = tuple(self.writer.image(content, kind) for content, kind in self.originals(prompt))
        payload = self.writer.payload(processed.pixel_values, processed.image_grid_thw)
        trained = record.trained(self.truncated)
        return (
            RecordedGroup(
                record=record,
                fields={"prompt_ids": processed.prompt_ids, "mm_token_type_ids": processed.mm_token_type_ids},
                prompt=RecordedPrompt(
                    row_id=prompt.row_id,
                    messages=prompt.messages,
                    answer=prompt.answer,
                    source=prompt.source,
                    partition=record.partition,
                    group=record.group,
                ),
                images=images,
                responses=made.responses,
                scores=finished.scores,
                loss_mask=[
                    np.full(len(response.token_ids), carries, np.uint8)
                    for response, carries in zip(made.responses, trained, strict=True)
                ],
                timing=Timing(batch=made.batch, decode_s=made.decode_s, score_s=finished.score_s, put_s=put_s),
            ),
            payload,
        )
