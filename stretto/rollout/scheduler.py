"""Drives partitions through processor, engines, reward and data plane, with several decode batches in flight.

``processor -> router -> reward -> put``: while engines decode, the images of the next batch are processed and the
responses of earlier ones are scored and put. Every stage works on threads or processes of its own, so the event loop
only hands over. Decode batch b is groups [b * m, (b + 1) * m) by index, whatever finishes first; under dynamic sampling
that holds for the candidates of each round (``refill.py``).

Partitions and evaluations issue their batches one after the other, in the order in which they came; the next one's
start as soon as the last batch of the one before is issued, while that is still being generated, scored and put. Under
dynamic sampling only the puts remain by then: where the next partition starts depends on what was kept.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np

from stretto.observe.trace import Tracer
from stretto.rollout.engine import GroupRequest, Sampling
from stretto.rollout.finished import Finished, Generated
from stretto.rollout.refill import Planned, Refill, TooFewGroups
from stretto.rollout.router import DecodeBatch, Decoded, Offer, Router
from stretto.types import (
    Evaluation,
    FailureKind,
    GroupFields,
    GroupRecord,
    PartitionPlan,
    ProcessedPrompt,
    Prompt,
    Response,
    Score,
    StrettoError,
)

FAILURES: tuple[FailureKind, ...] = get_args(FailureKind)
"""Kinds of scores without a reward; their counts become metrics, with ``reward_`` before their names."""
LOOK_AHEAD = 1
"""Batches that are processed, or ready and waiting for an engine, beside those that engines work on."""
EXAMPLES = 8

Put = Callable[[GroupRecord, GroupFields], Awaitable[None]]
Read = Callable[[int], Prompt]
"""The prompt of a group. May block; called from one thread at a time."""


class Clock(Protocol):
    def take(self) -> dict[str, float]: ...


class Processor(Protocol):
    @property
    def clock(self) -> Clock: ...

    async def process(self, prompt: Prompt) -> ProcessedPrompt: ...


class Rewarder(Protocol):
    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]: ...

    def check_partition(self, partition: int, scores: Sequence[Score]) -> None: ...


class Recorder(Protocol):
    async def group(self, record: GroupRecord, finished: Finished, put_s: float) -> None:
        """A group was put, ``put_s`` seconds after its partition's turn had begun."""
        ...

    async def partition(self, partition: int) -> None:
        """All groups of a partition were put."""
        ...


Finish = Callable[[int, Generated], Coroutine[Any, Any, None]]
"""What becomes of a candidate whose responses are there."""


@dataclass(kw_only=True)
class _Work:
    """A partition or an evaluation while its batches run. ``next_round``: see ``refill.Selection``."""

    name: str
    next_round: Callable[[], Awaitable[range]]
    read: Read
    finish: Finish
    sampling: Sampling
    partition: int
    offer: Offer | None
    batch_size: int
    span: str
    attrs: dict[str, Any]
    versions: set[int] = field(default_factory=set)
    load_s: float = 0.0
    begun_s: float = 0.0


class Scheduler:
    """Runs partitions and evaluations on the engines of ``router``, which has been started."""

    def __init__(
        self,
        *,
        router: Router,
        processor: Processor,
        rewarder: Rewarder,
        put: Put,
        sampling: Sampling,
        groups_per_decode_batch: int,
        tracer: Tracer,
        refill: Refill | None = None,
        recorder: Recorder | None = None,
    ):
        self.router = router
        self.processor = processor
        self.rewarder = rewarder
        self.put = put
        self.sampling = sampling
        self.groups_per_decode_batch = groups_per_decode_batch if router.fixed_batches else 1
        self.tracer = tracer
        self.refill = refill
        self.recorder = recorder
        self._issuing = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._room = asyncio.Semaphore(router.capacity + LOOK_AHEAD)
        self._order = itertools.count()

    async def run(self, plan: PartitionPlan, read: Read, offer: Offer | None) -> dict[str, float]:
        """Generate and score every candidate of ``plan`` and put what is kept; ``read(row)`` gives a prompt.

        ``offer`` is the version that generates all of it; None lets each batch take the newest. Returns the
        partition's counts over all candidates, ``last_put_s`` (wall clock), ``put_bytes``, ``rollout_load_s`` (mean
        over engines), ``rollout_s`` (the rest, from its turn on), and what ``refill.Selection.report`` adds. Raises the
        first error of any stage, once all started work has settled, so that no row of a failed partition appears later.
        """
        selection = Planned(plan.rows) if self.refill is None else self.refill.select(plan)
        tokens: dict[int, int] = {}
        scored: dict[int, list[Score]] = {}
        put: list[tuple[float, int]] = []

        def scores() -> list[Score]:
            return [score for candidate in sorted(scored) for score in scored[candidate]]

        async def finish(candidate: int, made: Generated) -> None:
            begun_s = time.monotonic()
            with self.tracer.span("reward.score", partition=plan.partition, group=candidate):
                scored[candidate] = await self.rewarder.score(made.prompt, made.responses)
            finished = Finished(generated=made, scores=scored[candidate], score_s=time.monotonic() - begun_s)
            record = group_record(
                plan.partition, candidate, made.prompt, made.processed, made.responses, finished.scores
            )
            tokens[candidate] = sum(record.response_tokens)
            for kept, whole in selection.settle(record, finished):
                fields = group_fields(whole.generated.processed, whole.generated.responses)
                put_s = time.monotonic() - work.begun_s
                put.append((time.time(), nbytes(fields)))  # before: it may be claimed before this call returns
                await self.put(kept, fields)
                if self.recorder is not None:
                    await self.recorder.group(kept, whole, put_s)

        work = _Work(
            name=f"partition {plan.partition}",
            next_round=selection.next_round,
            read=lambda candidate: read(selection.row(candidate)),
            finish=finish,
            sampling=self.sampling,
            partition=plan.partition,
            offer=offer,
            batch_size=self.groups_per_decode_batch,
            span="rollout.generate",
            attrs={"partition": plan.partition},
        )
        try:
            await self._complete(work)
        except TooFewGroups:
            self.rewarder.check_partition(plan.partition, scores())  # a reward that fails is the cause of it
            raise
        settled = scores()
        self.rewarder.check_partition(plan.partition, settled)
        kinds = Counter(score.failure for score in settled)
        load_s = work.load_s / self.router.replicas
        report = selection.report() | {
            "last_put_s": max(at for at, _ in put),
            "put_bytes": sum(moved for _, moved in put),
            **self.processor.clock.take(),
            "samples": len(settled),
            **{f"reward_{kind}": kinds[kind] for kind in FAILURES},
            "response_tokens": sum(tokens.values()),
            "rollout_load_s": load_s,
            "rollout_s": time.monotonic() - work.begun_s - load_s,
        }
        if self.recorder is not None:
            await self.recorder.partition(plan.partition)
        return report

    async def evaluate(self, prompts: int, read: Read, split: str, offer: Offer | None) -> Evaluation:
        """Rewards of greedy answers to ``read(0)`` … ``read(prompts - 1)`` and how many of them are exactly 1.0, under
        ``offer``'s version (None: the one the engines hold).
        """

        done: dict[int, tuple[str, str, Score]] = {}

        async def finish(group: int, made: Generated) -> None:
            (score,) = await self.rewarder.score(made.prompt, made.responses)
            done[group] = made.prompt.answer, made.responses[0].text, score

        work = _Work(
            name=f"evaluation on {split}",
            next_round=Planned(range(prompts)).next_round,
            read=read,
            finish=finish,
            sampling=Sampling(n=1, temperature=0.0, max_tokens=self.sampling.max_tokens, stop=self.sampling.stop),
            partition=0,
            offer=offer,
            batch_size=self.groups_per_decode_batch * self.sampling.n,
            span="rollout.evaluate",
            attrs={"split": split},
        )
        await self._complete(work)
        answers = [done[group] for group in range(prompts)]
        (version,) = work.versions or {-1 if offer is None else offer.version}
        return Evaluation(
            split=split,
            version=version,
            correct=sum(score.valid and score.value == 1.0 for _, _, score in answers),
            total=prompts,
            reward_mean=mean([score.value for _, _, score in answers if score.valid]),
            examples=tuple((wanted, got, score.value) for wanted, got, score in answers[:EXAMPLES]),
        )

    async def _complete(self, work: _Work) -> None:
        """Issue all batches of ``work`` when its turn has come, and return once all of them are through every stage."""
        size, index = work.batch_size, itertools.count()
        try:
            async with asyncio.TaskGroup() as tasks, self._issuing:
                work.begun_s = time.monotonic()
                while candidates := await work.next_round():
                    for at in range(0, len(candidates), size):
                        await self._room.acquire()
                        batch = tasks.create_task(self._batch(tasks, work, next(index), candidates[at : at + size]))
                        batch.add_done_callback(lambda _: self._room.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first in time; the others are what it brought about

    async def _batch(self, tasks: asyncio.TaskGroup, work: _Work, index: int, groups: range) -> None:
        """One decode batch up to its responses; what follows is left to tasks of their own."""
        order = next(self._order)
        prompts, processed = await self._processed(work, groups)
        requests = [
            GroupRequest(partition=work.partition, group=group, prompt=prompt)
            for group, prompt in zip(groups, processed, strict=True)
        ]
        decoded = await self.router.generate(
            DecodeBatch(
                order=order,
                requests=requests,
                sampling=work.sampling,
                offer=work.offer,
                span=work.span,
                attrs=work.attrs | {"batch": index},
            )
        )
        check_responses(work.name, requests, work.sampling, decoded)
        work.versions.add(decoded.version)
        work.load_s += decoded.load_s
        for group, prompt, ready, responses in zip(groups, prompts, processed, decoded.groups, strict=True):
            made = Generated(
                prompt=prompt, processed=ready, responses=responses, batch=index, decode_s=decoded.decode_s
            )
            tasks.create_task(work.finish(group, made))

    async def _processed(self, work: _Work, groups: range) -> tuple[list[Prompt], list[ProcessedPrompt]]:
        async with self._reading:
            prompts = await asyncio.to_thread(lambda: [work.read(group) for group in groups])
        return prompts, list(await asyncio.gather(*(self.processor.process(prompt) for prompt in prompts)))


def mean(values: Sequence[float]) -> float:
    """NaN of none. The sum is exact before it is rounded, so that no order of answers matters."""
    return math.fsum(values) / len(values) if values else math.nan


def check_responses(name: str, requests: Sequence[GroupRequest], sampling: Sampling, decoded: Decoded) -> None:
    """Raises StrettoError where an engine returned too few or too many responses, or not one log-prob a token, or where
    the versions of tokens contradict one another or those of the response.
    """
    if len(decoded.groups) != len(requests):
        raise StrettoError(
            f"{name}: the engine returned {len(decoded.groups)} groups of responses to {len(requests)} prompts"
        )
    for request, responses in zip(requests, decoded.groups, strict=True):
        place = f"{name}, group {request.group}"
        if len(responses) != sampling.n:
            raise StrettoError(f"{place}: the engine returned {len(responses)} responses instead of {sampling.n}")
        for i, response in enumerate(responses):
            if len(response.token_ids) != len(response.logprobs):
                raise StrettoError(
                    f"{place}, response {i}: the engine returned {len(response.token_ids)} token ids with "
                    f"{len(response.logprobs)} log-probs; there must be one for every token"
                )
            if not _stamped(response):
                raise StrettoError(
                    f"{place}, response {i}: the engine stamped {len(response.token_ids)} tokens with the versions "
                    f"{response.token_versions}, and the response with {response.version_start} to "
                    f"{response.version_end}"
                )


def _stamped(response: Response) -> bool:
    """Whether every token has a version, none older than the one before, from the response's first to its last."""
    each = response.token_versions
    if each is None:
        return response.version_start <= response.version_end
    whole = np.concatenate([[response.version_start], each, [response.version_end]])
    ends = len(each) == 0 or (whole[0] == whole[1] and whole[-1] == whole[-2])
    return len(each) == len(response.token_ids) and bool(ends and (np.diff(whole) >= 0).all())


def nbytes(fields: GroupFields) -> int:
    """Of all arrays of a group."""
    return sum(part.nbytes for column in fields.values() for part in (column if isinstance(column, list) else [column]))


def group_record(
    partition: int,
    group: int,
    prompt: Prompt,
    processed: ProcessedPrompt,
    responses: Sequence[Response],
    scores: Sequence[Score],
) -> GroupRecord:
    """The metadata of a finished group. A sample is valid if both its response and its reward are."""
    return GroupRecord(
        partition=partition,
        group=group,
        row_id=prompt.row_id,
        prompt_tokens=len(processed.prompt_ids),
        patches=len(processed.pixel_values),
        images=len(processed.image_grid_thw),
        response_tokens=tuple(len(r.token_ids) for r in responses),
        rewards=tuple(float(s.value) for s in scores),
        valid=tuple(s.valid and r.error is None for s, r in zip(scores, responses, strict=True)),
        truncated=tuple(r.finish_reason == "length" for r in responses),
        version_start=tuple(r.version_start for r in responses),
        version_end=tuple(r.version_end for r in responses),
    )


def group_fields(prompt: ProcessedPrompt, responses: Sequence[Response]) -> GroupFields:
    """The payload of a finished group, as ``types.GROUP_FIELDS`` declares it."""
    return {
        "prompt_ids": prompt.prompt_ids,
        "mm_token_type_ids": prompt.mm_token_type_ids,
        "pixel_values": prompt.pixel_values,
        "image_grid_thw": prompt.image_grid_thw,
        "response_ids": [np.asarray(r.token_ids, dtype=np.int32) for r in responses],
        "rollout_logprobs": [np.asarray(r.logprobs, dtype=np.float32) for r in responses],
    }
