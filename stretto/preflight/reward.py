"""The reward function: does it start, and what does it say of answers whose worth is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stretto.config import RewardConfig
from stretto.machine_checks import reward_function
from stretto.preflight.case import Case, Caution, Fact, Line
from stretto.rollout.reward import ABSTAINED, Rewarder
from stretto.types import Prompt, Response, Score, StrettoError

TRIED_ROWS = 3


@dataclass(frozen=True)
class Trial:
    """A row, the score of its own answer and that of another row's (None: no other answer is known)."""

    row_id: str
    right: Score
    wrong: Score | None


def reward(case: Case) -> Iterator[Line]:
    """Starts one reward process, which imports and checks the function as those of a run do, has it score a few rows,
    and ends it. At a start, one row that gets a score is enough.
    """
    if case.config.seams.replay:
        yield Fact("rewards are those of the recording")
        return
    malformed = list(reward_function(case.config, case.reader))
    yield from malformed
    if malformed:
        return
    function = case.config.reward.function
    if function == "exact_match" and not case.thorough:
        return
    begun = time.monotonic()
    try:
        trials = asyncio.run(_tried(case.config.reward.model_copy(update={"workers": 1}), case))
    except StrettoError as error:
        said = f"reward.function = {function!r}"
        yield case.reader.problem("reward.function", why=str(error).removeprefix(said).removeprefix(":").strip())
        return
    scores = [score for trial in trials for score in (trial.right, trial.wrong) if score is not None]
    failed = [score.error for score in scores if _failed(score)]
    if failed and len(failed) == len(scores):
        yield case.reader.problem(
            "reward.function",
            why=f"it failed for each of the {len(scores)} answers that were tried, the first with: {failed[0]}; "
            "mend it before it ends the run",
        )
    elif case.thorough:
        if not trials:
            yield Fact(f"{function} starts; it was not tried, since {case.no_prompts}")
            return
        yield from _said(function, trials, (time.monotonic() - begun))


def _failed(score: Score) -> bool:
    return not score.valid and score.error != ABSTAINED


def _said(function: str, trials: list[Trial], spent_s: float) -> Iterator[Line]:
    shown = "; ".join(f"{_word(t.right)} and {_word(t.wrong) if t.wrong else '-'}" for t in trials)
    yield Fact(
        f"{function}: right and wrong answers of {len(trials)} rows score {shown} ({spent_s:.1f} s with its start)"
    )
    for trial in trials:
        for score in (trial.right, trial.wrong):
            if score is not None and _failed(score):
                yield Caution(f"{function} failed for an answer to row {trial.row_id}: {score.error}")
    compared = [(t.right, t.wrong) for t in trials if t.wrong is not None and t.right.valid and t.wrong.valid]
    if compared and all(right.value <= wrong.value for right, wrong in compared):
        yield Caution(
            f"{function} does not score right answers above wrong ones: nothing could be learned by it, unless answers "
            "mean something else to it"
        )


def _word(score: Score) -> str:
    if score.valid:
        return f"{score.value:g}"
    return "abstained" if score.error == ABSTAINED else "failed"


async def _tried(config: RewardConfig, case: Case) -> list[Trial]:
    rewarder = Rewarder(config)
    try:
        await rewarder.start()
        trials: list[Trial] = []
        for prompt in _rows(case.prompts):
            trials.append(await _trial(rewarder, prompt, case.prompts))
            if not case.thorough and not _failed(trials[-1].right):
                break
        return trials
    finally:
        rewarder.close()


def _rows(prompts: list[Prompt]) -> list[Prompt]:
    """The first, one in the middle and the last."""
    return [prompts[i] for i in sorted({0, len(prompts) // 2, len(prompts) - 1})] if prompts else []


async def _trial(rewarder: Rewarder, prompt: Prompt, prompts: list[Prompt]) -> Trial:
    others = [p.answer for p in prompts if p.answer != prompt.answer]
    right, *wrong = await rewarder.score(prompt, [_response(text) for text in (prompt.answer, *others[:1])])
    return Trial(prompt.row_id, right, wrong[0] if wrong else None)


def _response(text: str) -> Response:
    """As an engine would report it, but for its tokens, which no reward function is shown."""
    nothing = np.zeros(0, np.int32)
    return Response(
        token_ids=nothing,
        logprobs=nothing.astype(np.float32),
        text=text,
        finish_reason="stop",
        version_start=0,
        version_end=0,
    )
