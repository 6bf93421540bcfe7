"""What the stages of the rollout side have made of a prompt group so far."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.types import ProcessedPrompt, Prompt, Response, Score


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A group whose responses are there. ``batch`` is the index of its decode batch within the partition, ``decode_s``
    the seconds that the engine took for all of that batch.
    """

    prompt: Prompt
    processed: ProcessedPrompt
    responses: list[Response]
    batch: int
    decode_s: float


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A group that is scored, too. ``score_s`` are the seconds until its rewards were there."""

    generated: Generated
    scores: list[Score]
    score_s: float
