"""A processed prompt as vLLM's engine takes it: ids with their image tokens, and the pixels that the trainer has.

vLLM's own processor is never used: it differs where it resizes, and would expand the image tokens again.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from stretto.types import ProcessedPrompt, StrettoError


def engine_input(prompt: ProcessedPrompt, merge_size: int) -> Any:
    """vLLM's ``EngineInput``; one object may serve all samples of the prompt.

    ``merge_size``: patches of an image token, along each side.

    Raises:
        StrettoError: image tokens, grids and pixels do not fit together; shows them.
    """
    from vllm.inputs.engine import mm_input, tokens_input

    ids = prompt.prompt_ids.tolist()
    places = image_places(prompt, merge_size)
    if not places:
        return tokens_input(ids)
    from vllm.multimodal.inputs import PlaceholderRange

    return mm_input(
        prompt_token_ids=ids,
        mm_kwargs=_items(prompt),
        mm_hashes={"image": _hashes(prompt)},
        mm_placeholders={"image": [PlaceholderRange(offset=offset, length=length) for offset, length in places]},
    )


def image_places(prompt: ProcessedPrompt, merge_size: int) -> list[tuple[int, int]]:
    """First token and number of tokens of each image.

    Raises:
        StrettoError: see ``engine_input``.
    """
    types, grid = prompt.mm_token_type_ids, prompt.image_grid_thw
    lengths = (grid.prod(-1) // merge_size**2).tolist()
    at = np.flatnonzero(types)
    places, begin = [], 0
    for length in lengths:
        run = at[begin : begin + length]
        if len(run) < length or run[-1] - run[0] + 1 != length:
            break
        places.append((int(run[0]), length))
        begin += length
    fits = len(types) == len(prompt.prompt_ids) and len(places) == len(grid) and begin == len(at)
    if not fits or int(grid.prod(-1).sum()) != len(prompt.pixel_values):
        raise StrettoError(
            f"a prompt's image tokens, grids and pixels do not fit together: {len(prompt.prompt_ids)} ids, image "
            f"tokens at {_runs(at)}, grids {grid.tolist()} (of {lengths} tokens), {len(prompt.pixel_values)} patches"
        )
    return places


def _runs(at: np.ndarray) -> list[str]:
    """Positions as ranges, for people."""
    cuts = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else []
    return [f"{run[0]}-{run[-1]}" for run in cuts]


def _images(prompt: ProcessedPrompt) -> list[np.ndarray]:
    """The patches of each image."""
    return np.split(prompt.pixel_values, np.cumsum(prompt.image_grid_thw.prod(-1))[:-1])


def _hashes(prompt: ProcessedPrompt) -> list[str]:
    """Of the content: vLLM gives a hash that it has seen the image features that it had then."""
    hashes = []
    for grid, pixels in zip(prompt.image_grid_thw, _images(prompt), strict=True):
        digest = hashlib.blake2b(grid.tobytes(), digest_size=16)
        digest.update(np.ascontiguousarray(pixels).data)
        hashes.append(digest.hexdigest())
    return hashes


def _items(prompt: ProcessedPrompt) -> Any:
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    grid = torch.from_numpy(prompt.image_grid_thw.astype(np.int64))
    # A copy: what comes from Ray's store is read-only, and torch has no such tensors.
    pixels = torch.from_numpy(np.array(prompt.pixel_values))
    return MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": pixels, "image_grid_thw": grid},
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
