"""A tiny random Qwen3-VL and prompts for it, shared by tests."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from torch import nn

from stretto.config import ModelConfig
from stretto.models.loading import load_family, load_model
from stretto.models.qwen3_vl import Qwen3VL
from stretto.types import Prompt

BLOCK = {
    "tie_word_embeddings": True,
    "text": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision": {
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,
    },
}


def model_config(dtype: str = "float32") -> ModelConfig:
    return ModelConfig(config=BLOCK, dtype=dtype)


@lru_cache(maxsize=1)
def family() -> Qwen3VL:
    return load_family(model_config())


def model(seed: int = 0, dtype: str = "float32") -> nn.Module:
    return load_model(model_config(dtype), seed)


def prompt(row: int, images: tuple[tuple[int, int], ...] = ((32, 64),), text: str = "Sum?") -> Prompt:
    """A prompt with random images of the given (height, width), text between them."""
    rng = np.random.default_rng(row)
    content: list[dict] = []
    for _ in images:
        content += [{"type": "image"}, {"type": "text", "text": ","}]
    content.append({"type": "text", "text": text})
    return Prompt(
        row_id=f"row-{row}",
        messages=({"role": "user", "content": content},),
        images=tuple(rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in images),
        answer="3+5=8",
        source="test",
    )
