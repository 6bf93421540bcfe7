"""What can only be checked with model and data at hand, and still before any process is started."""

from __future__ import annotations

from stretto.config import Config
from stretto.data.digits import longest_answer
from stretto.data.source import open_source
from stretto.models.loading import load_family
from stretto.plane.protocol import check_capacity
from stretto.types import ConfigError, ProcessedPrompt

SAMPLED_ROWS = 16


def preflight(config: Config) -> None:
    """Load tokenizer and processor, process a few prompts, and hold the batch options against them.

    Raises:
        ConfigError: everything that does not fit, at once.
    """
    problems: list[str] = []
    family = load_family(config.model)
    source = open_source(config.data, "train")
    step = max(1, len(source) // SAMPLED_ROWS)
    prompts = [family.process(source[row]) for row in range(0, len(source), step)]
    problems += _microbatches(config, prompts)
    answer = longest_answer(config.data) + 1
    if answer > config.rollout.max_response_tokens:
        problems.append(
            f"rollout.max_response_tokens = {config.rollout.max_response_tokens}: the longest answer of "
            f"data.digits = {config.data.digits} has {answer} tokens with its end; raise it to at least {answer}"
        )
    try:
        check_capacity(config.plane.capacity_mib * 2**20, partition_bytes(config, prompts), config.staleness.max)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def _microbatches(config: Config, prompts: list[ProcessedPrompt]) -> list[str]:
    actor, problems = config.actor, []
    longest = max(len(p.prompt_ids) for p in prompts) + config.rollout.max_response_tokens
    if longest > actor.max_tokens_per_microbatch:
        problems.append(
            f"actor.max_tokens_per_microbatch = {actor.max_tokens_per_microbatch}: a prompt with a response of "
            f"rollout.max_response_tokens has {longest} tokens; raise it to at least {longest}"
        )
    patches = max(len(p.pixel_values) for p in prompts)
    if patches > actor.max_patches_per_microbatch:
        problems.append(
            f"actor.max_patches_per_microbatch = {actor.max_patches_per_microbatch}: a prompt has {patches} image "
            f"patches; raise it to at least {patches}, or lower model.max_pixels"
        )
    return problems


def partition_bytes(config: Config, prompts: list[ProcessedPrompt]) -> int:
    """Upper estimate of one partition's payload: the largest of ``prompts`` for every group, full-length responses."""
    largest = max(
        p.prompt_ids.nbytes + p.mm_token_type_ids.nbytes + p.pixel_values.nbytes + p.image_grid_thw.nbytes
        for p in prompts
    )
    per_sample = config.rollout.max_response_tokens * 8
    return config.rollout.prompts_per_partition * (largest + config.rollout.n_samples_per_prompt * per_sample)
