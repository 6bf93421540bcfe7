"""The rows of the table: which quantities there are, where each is first seen, and what finds its differences."""

from __future__ import annotations

from stretto.parity.rows import PLACE, Quantity, absolute, metric, samples, symmetric, tensors, tokens

MAX_ABS = "max abs"
QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        name="prompt tokens",
        phase="inputs",
        origin="data",
        find=samples,
        columns=("prompt_hash",),
        prints=("inputs.prompt_ids", "inputs.mm_token_type_ids"),
    ),
    Quantity(
        name="response tokens",
        phase="inputs",
        origin="rollout",
        find=tokens,
        columns=("response_ids",),
        prints=("inputs.response_ids",),
    ),
    Quantity(
        name="response lengths", phase="inputs", origin="rollout", find=samples, columns=("lengths",), unit=MAX_ABS
    ),
    Quantity(name="loss masks", phase="phase 3", origin="rollout", find=tokens, columns=("loss_mask",)),
    Quantity(
        name="raw rewards",
        phase="inputs",
        origin="rollout",
        find=samples,
        columns=("raw_rewards",),
        prints=("inputs.rewards",),
        unit=MAX_ABS,
    ),
    Quantity(name="rewards", phase="phase 2", origin="judged", find=samples, columns=("rewards",), unit=MAX_ABS),
    Quantity(
        name="failed samples",
        phase="inputs",
        origin="rollout",
        find=samples,
        columns=("valid",),
        prints=("inputs.valid",),
    ),
    Quantity(name="truncation", phase="inputs", origin="rollout", find=samples, columns=("truncated",)),
    Quantity(
        name="multimodal tensors",
        phase="inputs",
        origin="data",
        find=samples,
        columns=("image_hash",),
        prints=("inputs.pixel_values", "inputs.image_grid_thw"),
    ),
    Quantity(
        name="policy versions",
        phase="inputs",
        origin="rollout",
        find=samples,
        columns=("version_start", "version_end"),
        unit="",
    ),
    Quantity(
        name="rollout log-probs",
        phase="inputs",
        origin="rollout",
        find=tokens,
        columns=("rollout_logprobs",),
        prints=("inputs.rollout_logprobs",),
        unit=MAX_ABS,
    ),
    Quantity(
        name="advantages",
        phase="phase 2",
        origin="judged",
        find=samples,
        columns=("advantages",),
        prints=("advantages",),
        unit=MAX_ABS,
    ),
    Quantity(
        name="microbatch schedule",
        phase="phase 1",
        origin="schedule",
        find=samples,
        columns=PLACE,
        prints=("schedule",),
    ),
    Quantity(
        name="old-policy log-probs",
        phase="phase 1",
        origin="log-probs",
        find=tokens,
        columns=("old_logprobs",),
        unit=MAX_ABS,
    ),
    Quantity(
        name="training log-probs",
        phase="phase 3",
        origin="training",
        find=tokens,
        columns=("train_logprobs",),
        unit=MAX_ABS,
    ),
    Quantity(name="loss", phase="phase 3", origin="trained", find=metric("loss", absolute), unit=MAX_ABS),
    Quantity(
        name="gradient norm", phase="phase 3", origin="norm", find=metric("grad_norm", symmetric), unit="relative"
    ),
    Quantity(
        name="gradients",
        phase="phase 3",
        origin="trained",
        find=tensors,
        columns=("hash.gradients",),
        prints=("gradients",),
    ),
    Quantity(
        name="parameters",
        phase="parameters",
        origin="trained",
        find=tensors,
        columns=("hash.parameters",),
        prints=("parameters",),
    ),
    Quantity(
        name="optimizer state",
        phase="parameters",
        origin="trained",
        find=tensors,
        columns=("hash.optimizer",),
        prints=("optimizer",),
    ),
)
"""In the order of the table. Without a critic returns are the advantages."""
