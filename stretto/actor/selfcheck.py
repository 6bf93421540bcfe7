"""Whether a forward without gradient has the bits of the training forward on this device, asked once at the start."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from stretto.actor.forward import forward_logprobs
from stretto.actor.trainer import Trainer
from stretto.models.batch import SampleInput
from stretto.types import Prompt

LENGTHS = (3, 5, 1)


def no_grad_is_grad(
    family: Any, trainer: Trainer, layout: Literal["padded", "shared"], device: torch.device | str
) -> bool:
    """Log-probs of one small microbatch, an image in its prompt, with and without gradient. Where they differ, the
    ratio of a dedicated old-policy forward is not exactly 1, and reusing the training forward is not exact.

    Leaves neither a gradient nor a random number drawn. False wherever dropout is drawn.
    """
    rng = np.random.default_rng(0)
    prompt = family.process(
        Prompt(
            row_id="self-check",
            messages=({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},),
            images=(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),),
        )
    )
    allowed = np.flatnonzero(~family.suppressed_V.cpu().numpy())
    samples = [SampleInput(prompt, rng.choice(allowed, n).astype(np.int32)) for n in LENGTHS]
    batch = family.collate(samples, device, layout)
    with torch.no_grad():
        without, _ = forward_logprobs(family, trainer.model, batch, trainer.temperature)
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return torch.equal(without, trainer.logprobs(batch))
