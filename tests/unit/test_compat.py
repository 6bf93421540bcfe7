"""The shims give what the installed transformers gives by its own entry point."""

import pytest
import torch
from transformers import DynamicCache, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from stretto import compat

IMAGE, START, END = 300, 301, 302


@pytest.fixture(scope="module")
def model() -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {
        "vocab_size": 306, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "rope_parameters": rope,
        "initializer_range": 0.2,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32, "patch_size": 16,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "initializer_range": 0.2,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START,
        vision_end_token_id=END, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """Two rows that each show a 64x32 image (2 image tokens of 8 patches)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[5, START, IMAGE, IMAGE, END, 7, 8], [9, START, IMAGE, IMAGE, END, 3, 4]])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(16, 1536, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 4]]),
    }


def positions(model, inputs):
    ids, grid, types = (inputs[k] for k in ("input_ids", "image_grid_thw", "mm_token_type_ids"))
    return model.model.get_rope_index(ids, image_grid_thw=grid, mm_token_type_ids=types)[0]


@torch.no_grad()
def test_ready_image_features_give_the_bits_of_the_models_own_forward(model, inputs):
    image = compat.image_features(model, inputs["pixel_values"], inputs["image_grid_thw"])
    ours = compat.last_hidden_state(model, inputs["input_ids"], positions(model, inputs), None, image, IMAGE)
    assert torch.equal(ours, model.model(**inputs)[0])


@torch.no_grad()
def test_deepstack_levels_and_images_reach_the_hidden_states(model, inputs):
    image = compat.image_features(model, inputs["pixel_values"], inputs["image_grid_thw"])
    assert image.pooled.shape == (4, 32)
    assert [level.shape for level in image.deepstack] == [(4, 32)]
    args = (inputs["input_ids"], positions(model, inputs), None)
    right = compat.last_hidden_state(model, *args, image, IMAGE)
    swapped = compat.last_hidden_state(model, *args, image.select(torch.tensor([2, 3, 0, 1])), IMAGE)
    flat = compat.ImageFeatures(image.pooled, tuple(torch.zeros_like(level) for level in image.deepstack))
    assert not torch.allclose(right, swapped, atol=1e-2)
    assert not torch.allclose(right, compat.last_hidden_state(model, *args, flat, IMAGE), atol=1e-2)


@torch.no_grad()
def test_the_cache_is_filled_and_continues_the_sequence(model, inputs):
    whole_ids, where = inputs["input_ids"], positions(model, inputs)
    image = compat.image_features(model, inputs["pixel_values"], inputs["image_grid_thw"])
    whole = compat.last_hidden_state(model, whole_ids, where, None, image, IMAGE)
    cache = DynamicCache(config=model.config.text_config)
    compat.last_hidden_state(model, whole_ids[:, :-1], where[..., :-1], None, image, IMAGE, cache)
    assert cache.get_seq_length() == 6
    last = compat.last_hidden_state(model, whole_ids[:, -1:], where[..., -1:], None, None, IMAGE, cache)
    torch.testing.assert_close(last[:, 0], whole[:, -1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_features_that_do_not_match_the_image_tokens_are_refused(model, inputs):
    image = compat.image_features(model, inputs["pixel_values"][:8], inputs["image_grid_thw"][:1])
    with pytest.raises(ValueError, match="4 image tokens for 2 image features"):
        compat.last_hidden_state(model, inputs["input_ids"], positions(model, inputs), None, image, IMAGE)
