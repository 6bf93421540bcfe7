"""Faults planted in live runs, for tests. With this folder on PYTHONPATH, every process of a run imports this file at
its start; ``TEST_FAULT`` names the fault, ``TEST_FAULT_ROW`` the row that some of them are planted in.

A fault is a function that changes a module of Stretto right after it was imported. It acts in partition 1 (of the stale
weight: in version 1) alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

ROW = os.environ.get("TEST_FAULT_ROW", "")
PARTITION, GROUP, SAMPLE = 1, 3, 2
TENSOR = "model.language_model.layers.0.mlp.down_proj.weight"


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """``owner.name(...)`` becomes ``wrapper(original, ...)``."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def swapped_images(module: ModuleType) -> None:
    """The pixels of the two images of a prompt, which are of equal size, change places."""

    def process(original: Any, self: Any, prompt: Any) -> Any:
        done = original(self, prompt)
        if prompt.row_id != ROW:
            return done
        first, second = done.image_grid_thw.prod(axis=1)
        assert first == second, "images of equal size"
        pixels = done.pixel_values.copy()
        pixels[:first], pixels[first:] = done.pixel_values[first:], done.pixel_values[:first]
        return replace(done, pixel_values=pixels)

    around(module.Qwen3VL, "process", process)


def shifted_mask(module: ModuleType) -> None:
    """The loss mask of the first microbatch is shifted by one token."""

    class Shifted:
        def __init__(self, trained_B: Any):
            self.trained_B = trained_B

        def __getitem__(self, row_T: Any) -> Any:
            mask_T = self.trained_B[row_T].roll(1)
            mask_T[0] = False
            return mask_T

    def rows(original: Any, self: Any, microbatch: Any, batch: Any) -> Any:
        made = original(self, microbatch, batch)
        if self.samples.partition == PARTITION and 0 in microbatch.samples:
            return replace(made, trained_B=Shifted(made.trained_B))
        return made

    around(module.ActorRankCore, "_rows", rows)


def reward_off(module: ModuleType) -> None:
    """The rewards of one row are off by 1e-6."""
    original = module.variety

    def variety(response: str, answer: str, row_id: str) -> float:
        return original(response, answer) + (1e-6 if row_id == ROW else 0.0)

    module.variety = variety


def schedule_off_by_one(module: ModuleType) -> None:
    """The second microbatch begins one sample too early."""

    def schedule(original: Any, index: int, records: Any, **options: Any) -> Any:
        made = original(index, records, **options)
        if records[0].partition != PARTITION or index != 0:
            return made
        first, second, *rest = made.ranks[0]
        first, second = (
            replace(first, samples=first.samples[:-1]),
            replace(second, samples=(first.samples[-1], *second.samples)),
        )
        return replace(made, ranks=((first, second, *rest), *made.ranks[1:]))

    around(module, "schedule_chunk", schedule)


def stale_weight(module: ModuleType) -> None:
    """The engine keeps one tensor of the version before."""

    def load(original: Any, model: Any, weights: Any) -> Any:
        tensor = dict(model.named_parameters())[TENSOR].data
        before = tensor.clone()
        version = original(model, weights)
        if version == 1:
            tensor.copy_(before)
        return version

    around(module, "load_buckets", load)


def dropped_token(module: ModuleType) -> None:
    """The last token of one response is lost."""

    def decode(original: Any, self: Any, requests: Any, *args: Any) -> Any:
        made = original(self, requests, *args)
        for request, responses in zip(requests, made, strict=True):
            if (request.partition, request.group) == (PARTITION, GROUP):
                whole = responses[SAMPLE]
                responses[SAMPLE] = replace(whole, token_ids=whole.token_ids[:-1], logprobs=whole.logprobs[:-1])
        return made

    around(module.HfEngine, "decode", decode)


def flipped_bit(module: ModuleType) -> None:
    """The lowest bit of one parameter flips after the update of a partition."""

    def step(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        if self.optimizer_step == PARTITION + 1:
            import torch

            self.master.masters[TENSOR].data.view(-1).view(torch.int32)[7] ^= 1
            self.master.cast_back()

    around(module.Trainer, "_step", step)


FAULTS = {
    "swapped_images": ("stretto.models.qwen3_vl", swapped_images),
    "shifted_mask": ("stretto.actor.rank", shifted_mask),
    "reward_off": ("rewards", reward_off),
    "schedule_off_by_one": ("stretto.phase1", schedule_off_by_one),
    "stale_weight": ("stretto.rollout.hf", stale_weight),
    "dropped_token": ("stretto.rollout.hf", dropped_token),
    "flipped_bit": ("stretto.actor.trainer", flipped_bit),
}


class Planter(importlib.abc.MetaPathFinder):
    """Plants ``fault`` in module ``name`` once it is imported."""

    def __init__(self, name: str, fault: Callable[[ModuleType], None]):
        self.name, self.fault = name, fault

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            around(spec.loader, "exec_module", self._exec)
        return spec

    def _exec(self, original: Any, module: ModuleType) -> None:
        original(module)
        self.fault(module)


if os.environ.get("TEST_FAULT"):
    sys.meta_path.insert(0, Planter(*FAULTS[os.environ["TEST_FAULT"]]))
