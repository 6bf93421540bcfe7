"""Samples laid out as tensors for one forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stretto.types import ProcessedPrompt


@dataclass(frozen=True)
class SampleInput:
    """One sample: a prompt (shared by object identity within its group) and its response ids, int32 [R]."""

    prompt: ProcessedPrompt
    response_ids: np.ndarray


@dataclass(frozen=True)
class ModelInputs:
    """What the model is called with.

    input_ids           int64   [B, S]
    position_ids        int64   [3, B, S]   time, height, width
    attention_mask      int64   [B, S] or None where nothing but causality masks (right padding, or no padding)
    pixel_values        float32 [N, D] or None, of the *distinct* prompts
    image_grid_thw      int64   [I, 3] or None, of the *distinct* prompts
    image_token_index   int64   [K] for each image token of the batch, in row order, its row in the distinct
                        prompts' image embeddings: one vision forward serves every sample of a group
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    image_token_index: Tensor | None


@dataclass(frozen=True)
class Responses:
    """Right-padded responses that go on from prompts which were forwarded before them, once a prompt.

    input_ids       int64 [B, C]     all but the last token of each response
    position_ids    int64 [3, B, C]
    attention_mask  int64 [B, S + C] over the prompt (padded to S on the left) and the response, or None where no prompt
                                     is padded
    prompt_row      int64 [B]        row of the prompt that each response goes on from
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    prompt_row: Tensor


@dataclass(frozen=True)
class SampleBatch:
    """Samples in one of two layouts. ``padded``: ``inputs`` are rows of prompt + response, right-padded. ``shared``:
    ``inputs`` are the distinct prompts, left-padded, and ``responses`` go on from them.

    predict_index   int64 [T]  row, among the hidden states [K, H], of the one that predicts each response token;
                               padded: those of all positions, row by row; shared: the last of each prompt, then those
                               of all positions of ``responses``
    response_ids_T  int64 [T]  response tokens in row order
    row_T           int64 [T]  row of each response token
    lengths         response tokens of each row (may be 0)
    """

    inputs: ModelInputs
    predict_index: Tensor
    response_ids_T: Tensor
    row_T: Tensor
    lengths: tuple[int, ...]
    responses: Responses | None = None


@dataclass(frozen=True)
class PromptBatch:
    """Left-padded prompts for a prefill; ``next_position`` int64 [B] is the position of the first response token."""

    inputs: ModelInputs
    next_position: Tensor
