"""The Qwen3-VL adapter against transformers' own processor, positions and forward."""

from __future__ import annotations

import copy
import math
import time

import numpy as np
import pytest
import tiny
import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from stretto.config import ModelConfig
from stretto.models.batch import SampleInput
from stretto.models.loading import image_patches, load_family, load_model, save_model, try_forward, weight_bytes
from stretto.models.logprobs import logprobs_and_entropy, scaled_logits, token_logprobs
from stretto.models.positions import mrope_positions
from stretto.models.qwen3_vl import Qwen3VL
from stretto.types import ConfigError, Prompt, StrettoError

LAYOUTS = [(), ((32, 64),), ((64, 32), (32, 32), (96, 64))]


class ImageOnlyProcessor(Qwen3VLProcessor):
    """transformers' processor without its video half, which needs torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        return None if argument is None else super().check_argument_for_proper_class(name, argument)


@pytest.mark.parametrize("images", LAYOUTS)
def test_processing_equals_the_processor_of_transformers(images):
    family = tiny.family()
    prompt = tiny.prompt(1, images)
    processed = family.process(prompt)
    reference = ImageOnlyProcessor(family.image_processor, family.tokenizer, None, family.tokenizer.chat_template)
    text = reference.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    out = reference(
        text=[text], images=list(prompt.images) or None, return_tensors="np", input_data_format="channels_last"
    )
    np.testing.assert_array_equal(processed.prompt_ids, out["input_ids"][0])
    np.testing.assert_array_equal(processed.mm_token_type_ids, out["mm_token_type_ids"][0])
    if images:
        np.testing.assert_array_equal(processed.pixel_values, out["pixel_values"])
        np.testing.assert_array_equal(processed.image_grid_thw, out["image_grid_thw"])
    else:
        assert processed.pixel_values.shape == (0, 1536) and processed.image_grid_thw.shape == (0, 3)


def test_images_and_image_parts_must_match_in_number():
    family = tiny.family()
    good = tiny.prompt(1)
    with pytest.raises(StrettoError, match=r"row row-1: 0 image\(s\), but its messages have 1 place"):
        family.process(Prompt(row_id=good.row_id, messages=good.messages))
    forged = ({"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"}]},)
    with pytest.raises(StrettoError, match="row x: 0 image"):
        family.process(Prompt(row_id="x", messages=forged))


@pytest.mark.parametrize("images", LAYOUTS)
def test_positions_equal_those_of_transformers(images):
    family, model = tiny.family(), tiny.model()
    processed = family.process(tiny.prompt(2, images))
    positions, after = mrope_positions(processed.mm_token_type_ids, processed.image_grid_thw, family.merge_size)
    ids = torch.from_numpy(processed.prompt_ids.astype(np.int64))[None]
    grid = torch.from_numpy(processed.image_grid_thw.astype(np.int64)) if images else None
    types = torch.from_numpy(processed.mm_token_type_ids.astype(np.int32))[None]
    expected, delta = model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert after == len(processed.prompt_ids) + int(delta[0])


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_a_mixed_batch_gives_each_sample_what_transformers_gives_it_alone(layout):
    family, model = tiny.family(), tiny.model()
    answers = [family.encode_answer("3+5=8"), family.encode_answer("1"), np.asarray([], np.int32)]
    distinct = [family.process(tiny.prompt(i, images)) for i, images in enumerate(LAYOUTS)]
    processed = [prompt for prompt in distinct for _ in range(2)]  # two samples of each group
    responses = [*answers[:2], answers[2], answers[0], answers[1][:1], answers[0]]
    batch = family.collate([SampleInput(p, r) for p, r in zip(processed, responses, strict=True)], layout=layout)
    assert batch.lengths == (6, 2, 0, 6, 1, 6) and batch.row_T.tolist() == [0] * 6 + [1] * 2 + [3] * 6 + [4] + [5] * 6
    assert len(batch.inputs.input_ids) == (3 if layout == "shared" else 6)
    with torch.no_grad():
        logits = family.response_logits(model, batch).split(list(batch.lengths))
        for prompt, response, got in zip(processed, responses, logits, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt.prompt_ids, response]).astype(np.int64))[None]
            extra = {}
            if len(prompt.pixel_values):
                extra = {
                    "pixel_values": torch.from_numpy(prompt.pixel_values),
                    "image_grid_thw": torch.from_numpy(prompt.image_grid_thw.astype(np.int64)),
                    "mm_token_type_ids": (ids == family.config.image_token_id).int(),
                }
            model.model.rope_deltas = None
            alone = model(input_ids=ids, **extra).logits[0]
            first = len(prompt.prompt_ids) - 1
            torch.testing.assert_close(got, alone[first : first + len(response)], rtol=0, atol=2e-5)


def test_one_vision_forward_a_group_is_bit_equal_to_repeated_pixels():
    family, model = tiny.family(), tiny.model()
    answer = family.encode_answer("3+5=8")
    processed = [family.process(tiny.prompt(i)) for i in range(3)]
    copies = [family.process(tiny.prompt(i)) for i in range(3) for _ in range(4)]
    shared = family.collate([SampleInput(p, answer) for p in processed for _ in range(4)])
    repeated = family.collate([SampleInput(p, answer) for p in copies])
    assert len(shared.inputs.pixel_values) * 4 == len(repeated.inputs.pixel_values)
    with torch.no_grad():
        assert torch.equal(family.response_logits(model, shared), family.response_logits(model, repeated))


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_no_grad_and_grad_forwards_are_bit_identical(layout):
    family, model = tiny.family(), tiny.model()
    batch = family.collate(
        [SampleInput(family.process(tiny.prompt(i)), family.encode_answer("3+5=8")) for i in range(5)], layout=layout
    )
    with torch.no_grad():
        without = family.response_logits(model, batch)
    assert torch.equal(without, family.response_logits(model, batch))


def test_responses_of_one_token_or_none_need_no_forward_beyond_their_prompt():
    family, model = tiny.family(), tiny.model()
    prompt = family.process(tiny.prompt(0))
    one, none = family.encode_answer("")[:1], np.asarray([], np.int32)
    for responses, tokens in (([one, none], 1), ([none, none], 0)):
        batch = family.collate([SampleInput(prompt, r) for r in responses], layout="shared")
        assert batch.responses.input_ids.shape == (2, 0)
        logits = family.response_logits(model, batch)
        assert logits.shape == (tokens, family.vocab_size)
        padded = family.collate([SampleInput(prompt, r) for r in responses])
        torch.testing.assert_close(logits, family.response_logits(model, padded), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.5, -math.log1p(math.exp(-4.0))), (1.0, -math.log1p(math.exp(-2.0))), (1.5, -math.log1p(math.exp(-2 / 1.5)))],
)
def test_the_log_prob_measure_divides_by_temperature_before_the_softmax(temperature, expected):
    logits = torch.tensor([[2.0, 0.0]])
    got = token_logprobs(logits, torch.tensor([0]), torch.zeros(2, dtype=torch.bool), temperature)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(expected, abs=1e-6)


def test_suppressed_ids_have_no_probability_and_no_share_of_the_entropy():
    logits = torch.tensor([[1.0, 1.0, 50.0]], dtype=torch.bfloat16)
    suppressed = torch.tensor([False, False, True])
    assert token_logprobs(logits, torch.tensor([1]), suppressed, 1.0).item() == pytest.approx(math.log(0.5), abs=1e-6)
    _, entropy = logprobs_and_entropy(logits, torch.tensor([1]), suppressed, 1.0, with_entropy=True)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    assert scaled_logits(logits, suppressed, 1.0)[0, 2].item() == -math.inf


def test_vision_and_special_ids_are_suppressed_but_eos_is_not():
    family = tiny.family()
    ids = family.tokenizer.convert_tokens_to_ids
    assert all(
        family.suppressed_V[ids(t)] for t in ("<|image_pad|>", "<|vision_start|>", "<|im_start|>", "<|endoftext|>")
    )
    assert not family.suppressed_V[list(family.eos_ids)].any()
    assert not family.suppressed_V[family.encode_answer("3+5=8")].any()


def test_a_saved_directory_loads_with_from_pretrained_and_gives_the_same_bits(tmp_path):
    family, model = tiny.family(), tiny.model()
    save_model(family, model, tmp_path / "model")
    plain = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32)
    again = load_family(ModelConfig(path=str(tmp_path / "model")))
    assert again.eos_ids == family.eos_ids
    assert torch.equal(again.suppressed_V, family.suppressed_V)
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    first, second = family.process(tiny.prompt(3)), again.process(tiny.prompt(3))
    np.testing.assert_array_equal(first.prompt_ids, second.prompt_ids)
    np.testing.assert_array_equal(first.pixel_values, second.pixel_values)


def test_random_initialisation_is_a_function_of_the_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two, other = tiny.model(1), tiny.model(1), tiny.model(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_of_a_published_version_counts_tied_weights_once(dtype, tmp_path):
    model, config = tiny.model(dtype=dtype), tiny.model_config(dtype)
    expected = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weight_bytes(config) == expected
    save_model(tiny.family(), model, tmp_path)
    assert weight_bytes(ModelConfig(path=str(tmp_path), dtype=dtype)) == expected


def test_a_model_that_cannot_be_loaded_names_key_value_and_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path = .*nowhere.*config.json"):
        load_family(ModelConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"model.config.txt = \{\}: no such key; did you mean model.config.text\?"):
        load_family(ModelConfig(config={"txt": {}}))


def test_a_model_of_the_hub_that_can_not_be_had_is_one_quick_message(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"model.path = 'org/model': there is no such folder .* HF_HUB_OFFLINE is set"
    ):
        load_family(ModelConfig(path="org/model"))
    with pytest.raises(ConfigError, match=r"no such folder, and no hub id either"):
        load_family(ModelConfig(path="a b"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9 can not be reached"):
        load_family(ModelConfig(path="org/model"))
    assert time.monotonic() - begun < 6


def changed(**entries) -> dict:
    """The block of the tiny model with entries set, or with ``...`` removed; ``__`` goes into a table."""
    block = copy.deepcopy(tiny.BLOCK)
    for name, value in entries.items():
        *path, key = name.split("__")
        table = block
        for part in path:
            table = table[part]
        if value is ...:
            del table[key]
        else:
            table[key] = value
    return block


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"text__hidden_size": "big"}, ['text.hidden_size = "big": expected an integer above 0']),
        ({"text__hidden_size": True}, ["text.hidden_size = true: expected an integer above 0"]),
        ({"text__rms_norm_eps": "1e-6"}, ['text.rms_norm_eps = "1e-6": expected a number above 0']),
        ({"tie_word_embeddings": "yes"}, ['tie_word_embeddings = "yes": expected true or false']),
        ({"text__hiden_size": 8}, ["text.hiden_size = 8: no such key; did you mean model.config.text.hidden_size?"]),
        (
            {"vision__depth": ..., "vision__num_hidden_layers": 2},
            ["vision.num_hidden_layers = 2: no such key; did you mean model.config.vision.depth?"],
        ),
        ({"text": ...}, ["text: missing; expected a table"]),
        ({"vision": ...}, ["vision: missing; expected a table"]),
        ({"vision": 3}, ["vision = 3: expected a table"]),
        ({"text__num_hidden_layers": ...}, ["text.num_hidden_layers: missing"]),
        (
            {"text__rope_parameters__mrope_section": [4, 2, 1]},
            ["text.rope_parameters.mrope_section = [4, 2, 1]: adds up to 7 instead of 8, half of head_dim = 16"],
        ),
        ({"text__rope_parameters__mrope_section": [0, 4, 4]}, ["text.rope_parameters.mrope_section = [0, 4, 4]"]),
        ({"text__rope_parameters__mrope_section": ...}, ["text.rope_parameters.mrope_section: missing"]),
        ({"text__rope_parameters": ...}, ["text.rope_parameters: missing"]),
        ({"text__num_key_value_heads": 3}, ["text.num_key_value_heads = 3: num_attention_heads = 2 is no multiple"]),
        ({"text__hidden_act": "slu"}, ["text.hidden_act = 'slu': no such activation; did you mean 'silu'?"]),
        ({"text__vocab_size": 100}, ["text.vocab_size = 100: the tokenizer has 286 ids; raise it"]),
        (
            {"text__attention_dropout": 1.0},
            ["text.attention_dropout = 1.0: expected a number of at least 0 and below 1"],
        ),
        ({"vision__out_hidden_size": 64}, ["vision.out_hidden_size = 64: must equal model.config.text.hidden_size"]),
        ({"vision__deepstack_visual_indexes": [2]}, ["vision.deepstack_visual_indexes = [2]: expected layers from 0"]),
        ({"vision__num_position_embeddings": 15}, ["vision.num_position_embeddings = 15: they form a square; use 9"]),
        ({"vision__patch_size": [16, 16]}, ["vision.patch_size = [16, 16]: expected an integer above 0"]),
        ({"vision__num_heads": 3}, ["vision.num_heads = 3: hidden_size = 32 must give each head a multiple of 4"]),
        ({"vision__in_channels": 1}, ["vision.in_channels = 1: expected 3"]),
        (
            {"text__hidden_size": "big", "vision__depth": 1.5, "txt": 1},
            ["txt = 1: no such key", 'text.hidden_size = "big"', "vision.depth = 1.5: expected an integer above 0"],
        ),
    ],
)
def test_mistakes_in_the_model_table_are_named_with_value_and_remedy_all_at_once(entries, said):
    with pytest.raises(ConfigError) as caught:
        load_family(ModelConfig(config=changed(**entries)))
    assert len(caught.value.problems) == len(said), caught.value.problems
    for problem, start in zip(caught.value.problems, said, strict=True):
        assert problem.startswith(f"model.config.{start}")


def test_what_the_specific_checks_let_through_is_caught_by_a_trial_forward():
    family = tiny.family()
    prompt = family.process(tiny.prompt(1))
    try_forward(tiny.model_config(), family, prompt)
    try_forward(tiny.model_config("bfloat16"), family, family.process(tiny.prompt(1, ())))
    broken = copy.deepcopy(family.config)
    broken.vision_config.out_hidden_size = 48
    other = Qwen3VL(broken, family.tokenizer, family.image_processor, family.eos_ids)
    with pytest.raises(ConfigError, match=r"model.config: a model of this configuration does not run \(\w+: \w"):
        try_forward(tiny.model_config(), other, prompt)


def test_the_trial_forward_is_quick_at_the_width_of_a_real_model():
    text = {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "vocab_size": 151936}
    vision = {"depth": 24, "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]}
    cfg = ModelConfig(config=changed(**prefixed("text", text), **prefixed("vision", vision)))
    family = load_family(cfg)
    prompt = family.process(tiny.prompt(1))
    begun = time.process_time()
    try_forward(cfg, family, prompt)
    assert time.process_time() - begun < 5


def prefixed(half: str, entries: dict) -> dict:
    return {f"{half}__{key}": value for key, value in entries.items()}


def test_patches_are_known_from_sizes_alone():
    family = tiny.family()
    prompt = tiny.prompt(1, ((64, 32), (32, 32), (96, 64), (50, 70)))
    assert image_patches(family, prompt.images) == len(family.process(prompt).pixel_values)


def test_images_smaller_than_one_token_are_refused():
    with pytest.raises(ConfigError, match=r"model.max_pixels = 1023: .* raise it to at least 1024"):
        load_family(ModelConfig(config=tiny.BLOCK, min_pixels=1, max_pixels=1023))


def test_a_processor_that_does_not_fit_the_model_is_refused(tmp_path):
    family, model = tiny.family(), tiny.model()
    save_model(family, model, tmp_path)
    config = tmp_path / "preprocessor_config.json"
    config.write_text(config.read_text().replace('"patch_size": 16', '"patch_size": 14'))
    with pytest.raises(ConfigError, match="patch_size is 16, the image processor's is 14"):
        load_family(ModelConfig(path=str(tmp_path)))
    assert load_model(ModelConfig(path=str(tmp_path)), 0) is not None
