"""All that can be known about a run before any of its processes is started, asked in one go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto import machine
from stretto.checks import Problem, Reader, machine_problems
from stretto.config import Config, RewardConfig
from stretto.plane.protocol import check_capacity
from stretto.rollout.reward import Rewarder
from stretto.settings import Resolved, resolve
from stretto.types import ConfigError, ProcessedPrompt, Prompt, StrettoError

if TYPE_CHECKING:  # torch and transformers take seconds to import: not before the options themselves are sound
    from stretto.models.qwen3_vl import Qwen3VL

SAMPLED_ROWS = 16
PATCHES_PROCESSED = 65536
"""Patches of all processed prompts together: a check takes seconds, whatever the size of images."""
PATCHES_TRIED = 4096
"""Patches up to which the trial forward takes a moment; attention needs time and memory by their square."""


def checked(
    recipe: Path | None, sets: Sequence[str] = (), environ: Mapping[str, str] = os.environ, *, training: bool = True
) -> tuple[Config, dict[str, str]]:
    """``stretto.settings.load``, and everything else that can be asked before a start: of the machine, and as soon as
    the options of model and data are sound, of model, data and reward function.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    resolved = resolve(recipe, sets, environ, training=training)
    if not resolved.unread:
        resolved.add(machine_problems(resolved.config, resolved.sources))
        if training:
            resolved.add(_placement(resolved.config))
            if "reward.function" not in resolved.doubtful:
                resolved.add(_reward(resolved.config, resolved.sources))
        if not any(name.startswith(("model.", "data.")) for name in resolved.doubtful):
            resolved.add(_model_and_data(resolved, training))
    if resolved.problems:
        raise ConfigError(resolved.problems)
    return resolved.config, resolved.sources


def _placement(config: Config) -> list[Problem]:
    if config.cluster.device != "cuda":  # the other choices fit every machine
        return []
    try:
        machine.placement(config)
    except ConfigError as error:
        names = ("cluster.device", "cluster.actor_cores", "cluster.rollout_cores")
        return [Problem(names, text) for text in error.problems]
    return []


def _reward(config: Config, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Starts one reward process, which imports and checks the function as those of a run do, and ends it."""
    if config.reward.function == "exact_match":
        return
    try:
        asyncio.run(_start_and_close(config.reward.model_copy(update={"workers": 1})))
    except StrettoError as error:
        said = f"reward.function = {config.reward.function!r}: "
        yield Reader(config, origins).problem("reward.function", why=str(error).removeprefix(said))


async def _start_and_close(config: RewardConfig) -> None:
    rewarder = Rewarder(config)
    try:
        await rewarder.start()
    finally:
        rewarder.close()


def _model_and_data(resolved: Resolved, training: bool) -> list[Problem]:
    """Load tokenizer and processor, process a few prompts, hold the batch options against them, try a forward."""
    from stretto.data.source import open_source
    from stretto.models.loading import load_family, try_forward

    config = resolved.config
    model_name = "model.path" if config.model.path else "model.config"
    try:
        family = load_family(config.model)
    except ConfigError as error:
        return [Problem((model_name,), text) for text in error.problems]
    try:
        source = open_source(config.data, "train")
    except ConfigError as error:
        return [Problem(("data.source",), text) for text in error.problems]
    step = max(1, len(source) // SAMPLED_ROWS)
    sampled = [source[row] for row in range(0, len(source), step)]
    reader = Reader(config, resolved.sources)
    prompts = _processed(family, sampled)
    problems: list[Problem] = []
    if training:
        problems += [*_too_many_patches(reader, family, sampled), *_answers(reader)]
        if prompts:
            problems += [*_longest(reader, prompts), *_capacity(reader, prompts)]
    shown = [p for p in prompts if 0 < len(p.pixel_values) <= PATCHES_TRIED]
    shown = shown or [p for p in prompts if not len(p.pixel_values)]
    if shown:
        try:
            try_forward(config.model, family, min(shown, key=lambda p: len(p.pixel_values)))
        except ConfigError as error:
            problems += [Problem((model_name,), text) for text in error.problems]
    return problems


def _too_many_patches(reader: Reader, family: Qwen3VL, prompts: list[Prompt]) -> Iterator[Problem]:
    """Told from the sizes of images, before any is processed: large ones take minutes."""
    from stretto.models.loading import image_patches

    limit = reader.config.actor.max_patches_per_microbatch
    patches = max(image_patches(family, p.images) for p in prompts)
    if patches > limit:
        model = reader.config.model
        yield reader.problem(
            "actor.max_patches_per_microbatch",
            why=f"a prompt has {patches} image patches; raise it to at least {patches}, or lower model.min_pixels = "
            f"{model.min_pixels} or model.max_pixels = {model.max_pixels}",
        )


def _processed(family: Qwen3VL, prompts: list[Prompt]) -> list[ProcessedPrompt]:
    """The largest first, as long as they stay within ``PATCHES_PROCESSED``; none where one alone exceeds it."""
    from stretto.models.loading import image_patches

    result: list[ProcessedPrompt] = []
    total = 0
    for prompt in sorted(prompts, key=lambda p: image_patches(family, p.images), reverse=True):
        total += image_patches(family, prompt.images)
        if total > PATCHES_PROCESSED:
            break
        result.append(family.process(prompt))
    return result


def _longest(reader: Reader, prompts: list[ProcessedPrompt]) -> Iterator[Problem]:
    longest = max(len(p.prompt_ids) for p in prompts) + reader.config.rollout.max_response_tokens
    if longest > reader.config.actor.max_tokens_per_microbatch:
        yield reader.problem(
            "actor.max_tokens_per_microbatch",
            "rollout.max_response_tokens",
            why=f"the longest prompt with a response of that length has {longest} tokens; raise "
            f"max_tokens_per_microbatch to at least {longest}",
        )


def _answers(reader: Reader) -> Iterator[Problem]:
    from stretto.data.digits import longest_answer

    config = reader.config
    answer = longest_answer(config.data) + 1
    if answer > config.rollout.max_response_tokens:
        yield reader.problem(
            "rollout.max_response_tokens",
            why=f"the longest answer of data.digits = {config.data.digits} has {answer} tokens with its end; raise it "
            f"to at least {answer}",
        )


def _capacity(reader: Reader, prompts: list[ProcessedPrompt]) -> list[Problem]:
    config = reader.config
    names = ("plane.capacity_mib", "rollout.prompts_per_partition", "rollout.n_samples_per_prompt", "staleness.max")
    try:
        check_capacity(config.plane.capacity_mib * 2**20, partition_bytes(config, prompts), config.staleness.max)
    except ConfigError as error:
        return [Problem(names, text) for text in error.problems]
    return []


def partition_bytes(config: Config, prompts: list[ProcessedPrompt]) -> int:
    """Upper estimate of one partition's payload: the largest of ``prompts`` for every group, full-length responses."""
    largest = max(
        p.prompt_ids.nbytes + p.mm_token_type_ids.nbytes + p.pixel_values.nbytes + p.image_grid_thw.nbytes
        for p in prompts
    )
    per_sample = config.rollout.max_response_tokens * 8
    return config.rollout.prompts_per_partition * (largest + config.rollout.n_samples_per_prompt * per_sample)
