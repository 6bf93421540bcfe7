"""Which of a model's parameters are trained, and whether its training forward draws dropout."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import nn

from stretto.config import Config
from stretto.models import lora
from stretto.models.loading import without_weights


class Parts(Protocol):
    """What is needed of a model family."""

    def part(self, parameter: str) -> str:
        """``vision_tower``, ``projector`` or ``language_model``: where a parameter of this name belongs."""
        ...


def prepare(model: nn.Module, family: Parts, config: Config) -> None:
    """Leave with ``requires_grad`` what a run trains: the adapters that are put in, where ``lora.rank`` is set, else
    all but ``actor.freeze``.

    Raises:
        ConfigError: as ``lora.inject``.
    """
    if config.lora.rank > 0:
        lora.inject(model, config.lora, config.run.seed)
    for name, parameter in model.named_parameters():
        if family.part(name) in config.actor.freeze:
            parameter.requires_grad_(False)


def trained_parameters(config: Config, family: Parts) -> int:
    """How many parameters ``prepare`` leaves to be trained. Allocates none."""
    model = without_weights(config.model)
    if config.lora.rank > 0:
        return lora.adapter_parameters(model, config.lora)
    return sum(p.numel() for name, p in model.named_parameters() if family.part(name) not in config.actor.freeze)


def has_dropout(model: nn.Module) -> bool:
    """Whether train mode would draw random numbers: a dropout layer, or attention that drops out."""
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0) or getattr(module, "attention_dropout", 0.0) > 0
        for module in model.modules()
    )


def seed_dropout(seed: int, rank: int = 0) -> None:
    """Start torch's generators for the dropout of one rank: another stream on each, all from ``run.seed``."""
    # Mixed, since torch's CPU generator looks at 32 bits of a seed only.
    torch.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
