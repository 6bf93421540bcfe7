"""Supervised warm-start: a model that answers now and then, so that groups have something to prefer.

Stopped by a validation criterion, not by a number of steps: too early and no sample is ever right, too late and all
samples of a group agree; either way GRPO has no signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto import build
from stretto.actor.optim import warmup_constant_decay
from stretto.actor.trainer import Trainer
from stretto.config import Config
from stretto.data.check import Note, silent
from stretto.data.cursor import rows_of_partition
from stretto.data.source import Source
from stretto.models.batch import SampleInput
from stretto.models.loading import load_family, load_model, save_model
from stretto.models.parts import seed_dropout
from stretto.models.qwen3_vl import Qwen3VL
from stretto.rollout.engine import GroupRequest, Sampling
from stretto.rollout.hf import HfEngine
from stretto.rollout.reward import exact_match
from stretto.types import StrettoError

LOSS_MEMORY = 0.9
"""Decay of the running loss average that ``sft.eval_below_loss`` is compared with."""

Report = Callable[[int, float, float | None], None]
"""Called after each step with (step from 1, loss, validation exact match or None where it was not measured)."""


@dataclass(frozen=True)
class SftResult:
    """``exact_match`` is greedy, on the validation split, at the step where training stopped."""

    steps: int
    loss: float
    exact_match: float


def run_sft(config: Config, output: Path, report: Report = lambda *_: None, note: Note = silent) -> SftResult:
    """Train on the ``labelled`` split until validation exact match reaches ``sft.stop_exact_match``, and write a
    Hugging Face directory to ``output``.

    Raises:
        StrettoError: the criterion was not reached within ``sft.steps``; the model is written all the same, since hours
            may have gone into it.
    """
    sft = config.sft
    family, model = load_family(config.model), load_model(config.model, config.run.seed)
    labelled = build.source(config, "labelled", family, keep=False, note=note)
    validation = build.source(config, "validation", family, keep=False, note=note)
    lr = warmup_constant_decay(
        peak=sft.lr, warmup=sft.warmup_steps, updates=sft.steps, decay_fraction=0.0, decay_to=1.0
    )
    seed_dropout(config.run.seed)
    trainer = Trainer(family, model, config.actor, lr, temperature=1.0)
    validate = _Validation(config, family, model, validation)

    average = exact = None
    for step in range(sft.steps):
        batch = family.collate(_samples(config, family, labelled, step))
        trainer.begin()
        trainer.train(batch, _negative_log_likelihood)
        loss = trainer.finish(len(batch.response_ids_T)).loss
        average = loss if average is None else LOSS_MEMORY * average + (1 - LOSS_MEMORY) * loss
        measured = average < sft.eval_below_loss and (step + 1) % sft.eval_every == 0
        exact = validate() if measured else None
        report(step + 1, loss, exact)
        if exact is not None and exact >= sft.stop_exact_match:
            save_model(family, model, output)
            return SftResult(step + 1, loss, exact)
    save_model(family, model, output)
    exact = validate() if exact is None else exact
    if sft.stop_exact_match == 1.0:
        return SftResult(sft.steps, loss, exact)
    digits = config.data.source == "digits"
    more = "or data.labelled_images" if digits else "or add rows to data.train_files,"
    raise StrettoError(
        f"sft.steps = {sft.steps}: validation exact match is {exact:.1%} and did not reach sft.stop_exact_match = "
        f"{sft.stop_exact_match} (average loss {average:.3f}); the model as it is was written to {output}. For a "
        f"better one raise sft.steps {more} and name another folder; or lower sft.stop_exact_match, or set it to "
        "1 to stop after sft.steps whatever comes out"
    )


def _negative_log_likelihood(logprobs_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_T.sum(), {}


def _samples(config: Config, family: Qwen3VL, source: Source, step: int) -> list[SampleInput]:
    _, rows = rows_of_partition(step, config.sft.batch, len(source), config.run.seed, shuffle=True)
    prompts = [source[row] for row in rows]
    return [SampleInput(family.process(p), family.encode_answer(p.answer)) for p in prompts]


class _Validation:
    """Greedy exact match of the model as it is, on prompts that are processed once."""

    def __init__(self, config: Config, family: Qwen3VL, model: torch.nn.Module, source: Source):
        prompts = [source[row] for row in range(min(config.eval.prompts, len(source)))]
        self.answers: Sequence[str] = [p.answer for p in prompts]
        self.requests = [GroupRequest(partition=0, group=i, prompt=family.process(p)) for i, p in enumerate(prompts)]
        self.engine = HfEngine(family, lambda: model, "cpu")
        self.sampling = Sampling(n=1, temperature=0.0, max_tokens=config.rollout.max_response_tokens)

    def __call__(self) -> float:
        responses = self.engine.decode(self.requests, self.sampling)
        right = [exact_match(r.text, a) for (r,), a in zip(responses, self.answers, strict=True)]
        return sum(right) / len(right)
