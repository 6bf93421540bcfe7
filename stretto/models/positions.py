"""Multimodal rotary positions of Qwen-VL (time, height, width) on the host, once per prompt.

Source: transformers' ``Qwen3VLModel.get_rope_index``, which keeps state on the model; a test holds this
stateless version equal to it.
"""

from __future__ import annotations

import numpy as np


def mrope_positions(
    mm_token_type_ids: np.ndarray, image_grid_thw: np.ndarray, merge_size: int
) -> tuple[np.ndarray, int]:
    """Positions int64 [3, P] of a prompt and the position of the first token after it.

    Text advances all three axes by one; an image of (t, h, w) merged patches spans t, h and w from its start, and
    the text after it goes on at start + max(h, w). A text-only prompt has ``arange(P)`` on every axis.
    """
    types = np.asarray(mm_token_type_ids)
    positions = np.empty((3, len(types)), dtype=np.int64)
    edges = np.flatnonzero(np.diff(types)) + 1
    grids = iter(image_grid_thw)
    current = 0
    for run in np.split(np.arange(len(types)), edges):
        if len(run) == 0:
            continue
        if types[run[0]] == 0:
            positions[:, run] = current + np.arange(len(run))
            current += len(run)
            continue
        t, h, w = (int(v) for v in next(grids))
        h, w = h // merge_size, w // merge_size
        grid = np.stack(np.meshgrid(np.arange(t), np.arange(h), np.arange(w), indexing="ij")).reshape(3, -1)
        positions[:, run] = current + grid
        current += max(h, w)
    return positions, current
