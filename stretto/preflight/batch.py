"""Options of batches against the prompts of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stretto.config import Config
from stretto.plane.protocol import check_capacity
from stretto.preflight.case import Case, Fact, Line, problems_of, size
from stretto.problems import Problem, Reader
from stretto.types import ConfigError, ProcessedPrompt, Prompt

if TYPE_CHECKING:
    from stretto.models.qwen3_vl import Qwen3VL


def batch(case: Case) -> Iterator[Line]:
    if case.family is None or not case.prompts:
        yield Fact(f"not looked at, since {case.no_prompts if case.family else 'there is no model'}")
        return
    found: list[Line] = [*_answers(case.reader)]
    # Too long rows of files are left out, or refused where all are looked at.
    if case.config.data.source == "digits" or case.config.seams.replay:
        found += _too_many_patches(case.reader, case.family, case.prompts)
        found += _longest(case.reader, case.processed)
    if case.processed:
        found += _capacity(case.config, case.processed)
    yield from found
    if not found and case.processed:
        rollout = case.config.rollout
        held = (case.config.staleness.max + 1) * partition_bytes(case.config, case.processed)
        yield Fact(
            f"{rollout.prompts_per_partition} prompts x {rollout.n_samples_per_prompt} samples fit; the plane holds "
            f"{size(held)} at most, of {size(case.config.plane.capacity_mib * 2**20)}"
        )


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


def _longest(reader: Reader, prompts: list[ProcessedPrompt]) -> Iterator[Problem]:
    longest = max((len(p.prompt_ids) for p in prompts), default=0) + reader.config.rollout.max_response_tokens
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
    if config.data.source != "digits":  # only there is it known what an answer looks like
        return
    answer = longest_answer(config.data) + 1
    if answer > config.rollout.max_response_tokens:
        yield reader.problem(
            "rollout.max_response_tokens",
            why=f"the longest answer of data.digits = {config.data.digits} has {answer} tokens with its end; raise it "
            f"to at least {answer}",
        )


def _capacity(config: Config, prompts: list[ProcessedPrompt]) -> Iterator[Problem]:
    names = ("plane.capacity_mib", "rollout.prompts_per_partition", "rollout.n_samples_per_prompt", "staleness.max")
    try:
        check_capacity(config.plane.capacity_mib * 2**20, partition_bytes(config, prompts), config.staleness.max)
    except ConfigError as error:
        yield from problems_of(error, *names)


def partition_bytes(config: Config, prompts: list[ProcessedPrompt]) -> int:
    """Upper estimate of one partition's payload: the largest of ``prompts`` for every group, full-length responses."""
    largest = max(
        p.prompt_ids.nbytes + p.mm_token_type_ids.nbytes + p.pixel_values.nbytes + p.image_grid_thw.nbytes
        for p in prompts
    )
    per_sample = config.rollout.max_response_tokens * 8
    return config.rollout.prompts_per_partition * (largest + config.rollout.n_samples_per_prompt * per_sample)
