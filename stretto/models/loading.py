"""Models from a local directory, a hub id, or a config block; and back to a Hugging Face directory."""

from __future__ import annotations

import copy
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.activations import ACT2FN
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stretto import model_table
from stretto.config import ModelConfig
from stretto.models.batch import SampleInput
from stretto.models.logprobs import token_logprobs
from stretto.models.qwen3_vl import Qwen3VL
from stretto.models.tokenizer import build_tokenizer
from stretto.types import ConfigError, ProcessedPrompt
from stretto.wording import nearest

HUB_TIMEOUT_S = 5.0
REMEDY = (
    "give a directory that holds config.json, the tokenizer, preprocessor_config.json and safetensors weights "
    "(`stretto export` and `stretto sft` write one), or the id of a Qwen3-VL on the hub"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAMILIES = {"qwen3_vl": Qwen3VL}
"""Model type of the config -> adapter. A new family is one adapter file and one line here."""


def load_family(cfg: ModelConfig) -> Qwen3VL:
    """Tokenizer, chat template, image processor and config of the model, without its weights.

    Images always go through transformers' PIL processor, so that pixels do not depend on whether torchvision is
    installed.

    Raises:
        ConfigError: model not found, of an unknown family, without chat template, or one whose processor does not
            fit it; names the key, the value and the remedy.
    """
    family = _load_family(cfg)
    processor = family.image_processor
    smallest = (processor.patch_size * processor.merge_size) ** 2
    if cfg.max_pixels < smallest:
        raise ConfigError(
            [
                f"model.max_pixels = {cfg.max_pixels}: one image token shows {smallest} pixels (patch_size "
                f"{processor.patch_size}, spatial_merge_size {processor.merge_size}); raise it to at least {smallest}"
            ]
        )
    return family


def _load_family(cfg: ModelConfig) -> Qwen3VL:
    size = {"shortest_edge": cfg.min_pixels, "longest_edge": cfg.max_pixels}
    if not cfg.path:
        tokenizer = build_tokenizer()
        config = _config_from_block(cfg.config, tokenizer)
        vision = config.vision_config
        image_processor = Qwen2VLImageProcessorPil(
            size=size,
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
        )
        return Qwen3VL(config, tokenizer, image_processor, [tokenizer.eos_token_id])
    _check_hub(cfg.path)
    try:
        config = AutoConfig.from_pretrained(cfg.path)
        tokenizer = AutoTokenizer.from_pretrained(cfg.path)
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(cfg.path, size=size)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ConfigError([f"model.path = {cfg.path!r}: cannot be loaded ({_first_line(error)}); {REMEDY}"]) from error
    _check_fit(cfg, config, tokenizer, image_processor)
    return FAMILIES[config.model_type](config, tokenizer, image_processor, _eos_ids(cfg.path, config, tokenizer))


def _check_hub(path: str) -> None:
    """Whether a hub id can be had: asked once and briefly, where the hub's client tries for half a minute."""
    if Path(path).exists():
        return
    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return
    except ValueError as error:  # HFValidationError: neither a folder nor a possible id
        raise ConfigError(
            [f"model.path = {path!r}: no such folder, and no hub id either ({_first_line(error)}); {REMEDY}"]
        ) from None
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set; unset it"
    elif _reachable(constants.ENDPOINT):
        return
    else:
        why = f"{constants.ENDPOINT} can not be reached from here; mend the connection"
    raise ConfigError(
        [
            f"model.path = {path!r}: there is no such folder and no downloaded copy of a hub model of that name, and "
            f"{why}, download it elsewhere and name its folder, or make a model with `stretto sft`"
        ]
    )


def _reachable(url: str) -> bool:
    """Whether a server answers at all, proxies of the environment included; what it answers does not matter."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return not isinstance(error.reason, socket.gaierror | ConnectionError | TimeoutError)
    except OSError:
        return False


def _first_line(error: BaseException) -> str:
    """What an error says, without the lines that only say where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, StrictDataclassError):  # the second line holds the reason
        return " ".join(lines[:2])
    return lines[0] if lines else type(error).__name__


def _eos_ids(path: str, config: Any, tokenizer: Any) -> list[int]:
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = None
    if eos is None:
        eos = tokenizer.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos)


def _check_fit(cfg: ModelConfig, config: Any, tokenizer: Any, image_processor: Any) -> None:
    where = f"model.path = {cfg.path!r}"
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError([f"{where}: model type {config.model_type!r} is not supported; use one of: {known}"])
    problems = []
    vision = config.vision_config
    for name, model_has, processor_has in (
        ("patch_size", vision.patch_size, image_processor.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size, image_processor.temporal_patch_size),
        ("spatial_merge_size", vision.spatial_merge_size, image_processor.merge_size),
    ):
        if model_has != processor_has:
            problems.append(
                f"{where}: the model's {name} is {model_has}, the image processor's is {processor_has}; take "
                "preprocessor_config.json from the same release as config.json"
            )
    if len(tokenizer) > config.text_config.vocab_size:
        problems.append(
            f"{where}: the tokenizer has {len(tokenizer)} ids, the model {config.text_config.vocab_size}; take "
            "tokenizer and config.json from the same release"
        )
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    if image_token != config.image_token_id:
        problems.append(
            f"{where}: '<|image_pad|>' is id {image_token} in the tokenizer and image_token_id {config.image_token_id} "
            "in config.json; take both from the same release"
        )
    if not tokenizer.chat_template:
        problems.append(f"{where}: the tokenizer has no chat template; add chat_template.jinja to the directory")
    if problems:
        raise ConfigError(problems)


def _config_from_block(block: dict[str, Any] | None, tokenizer: Any) -> Qwen3VLConfig:
    """``[model.config]`` with tables ``text`` and ``vision`` (transformers' names) and ``tie_word_embeddings``."""
    if block is None:
        raise ConfigError(["model.path and model.config are both unset: name a model, or give a [model.config] block"])
    model_table.check(block)
    text = {"vocab_size": len(tokenizer)} | dict(block["text"])
    vision = dict(block["vision"])
    chosen = {"text": str(text.get("hidden_act", "silu")), "vision": str(vision.get("hidden_act", "silu"))}
    problems = [
        f"model.config.{half}.hidden_act = {name!r}: no such activation; did you mean {nearest(name, ACT2FN)!r}?"
        for half, name in chosen.items()
        if name not in ACT2FN
    ]
    if text["vocab_size"] < len(tokenizer):
        problems.append(
            f"model.config.text.vocab_size = {text['vocab_size']}: the tokenizer has {len(tokenizer)} ids; raise it to "
            f"at least {len(tokenizer)}"
        )
    if (text.get("pad_token_id") or 0) >= text["vocab_size"]:
        problems.append(
            f"model.config.text.pad_token_id = {text['pad_token_id']}: the model has {text['vocab_size']} ids, from 0 "
            "on; leave it out"
        )
    if problems:
        raise ConfigError(problems)
    ids = tokenizer.convert_tokens_to_ids
    try:
        return Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            tie_word_embeddings=bool(block.get("tie_word_embeddings", True)),
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(
            [f"model.config: not a Qwen3-VL configuration ({_first_line(error)}); see docs/models.md for an example"]
        ) from error


def load_model(cfg: ModelConfig, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """The model in training layout (every parameter of ``cfg.dtype``), dropout off, on ``device``.

    From a config block the weights are random, drawn on the CPU from ``seed`` so that they are the same everywhere.
    """
    dtype = DTYPES[cfg.dtype]
    if cfg.path:
        model = Qwen3VLForConditionalGeneration.from_pretrained(
            cfg.path, dtype=dtype, attn_implementation=cfg.attention
        )
    else:
        config = _config_from_block(cfg.config, build_tokenizer())
        config._attn_implementation = cfg.attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3VLForConditionalGeneration(config).to(dtype)
    return model.eval().to(device)


def weight_bytes(cfg: ModelConfig) -> int:
    """Bytes of the whole model: every parameter once, in ``cfg.dtype``. Allocates none of them."""
    return sum(p.numel() for p in without_weights(cfg).parameters()) * DTYPES[cfg.dtype].itemsize


def without_weights(cfg: ModelConfig) -> nn.Module:
    """The model on the meta device: its layers, names and shapes."""
    config = AutoConfig.from_pretrained(cfg.path) if cfg.path else _config_from_block(cfg.config, build_tokenizer())
    with torch.device("meta"):
        return Qwen3VLForConditionalGeneration(config)


def image_patches(family: Qwen3VL, images: Sequence[np.ndarray]) -> int:
    """Patches that ``images`` [height, width, 3] will have, from their sizes alone."""
    return sum(family.patches(images))


def try_forward(cfg: ModelConfig, family: Qwen3VL, prompt: ProcessedPrompt) -> None:
    """Prove that the model of a config runs: one response token of one processed prompt.

    The layers of each kind are alike, so one stands for all (as many as there are deepstack levels). Weights are zeros
    that take no memory, so that it takes a moment at any width; nothing is downloaded or drawn.

    Raises:
        ConfigError: whatever the library raised, in one line.
    """
    config = copy.deepcopy(family.config)
    levels = len(config.vision_config.deepstack_visual_indexes)
    config.text_config.num_hidden_layers = max(1, levels)
    config.vision_config.depth = max(1, levels)
    config.vision_config.deepstack_visual_indexes = list(range(levels))
    config._attn_implementation = cfg.attention
    try:
        with torch.device("meta"):
            model = Qwen3VLForConditionalGeneration(config).to(DTYPES[cfg.dtype]).eval()
        _fill_with_nothing(model)
        batch = family.collate([SampleInput(prompt, np.asarray(family.eos_ids[:1], np.int32))])
        with torch.no_grad():
            logits = family.response_logits(model, batch)
            token_logprobs(logits, batch.response_ids_T, family.suppressed_V, 1.0)
    except Exception as error:  # whatever goes wrong in there, the run would end by it after its start
        where = f"model.path = {cfg.path!r}" if cfg.path else "model.config"
        raise ConfigError(
            [
                f"{where}: a model of this configuration does not run ({type(error).__name__}: {_first_line(error)}); "
                "compare its sizes with those of a model that does, such as the example in docs/models.md"
            ]
        ) from error


def _fill_with_nothing(model: nn.Module) -> None:
    """Replace what is on the meta device by zeros of the same shape, each a view of a single number."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_zeros_like(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _zeros_like(buffer)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def save_model(family: Qwen3VL, model: nn.Module, directory: Path) -> None:
    """A directory that ``from_pretrained`` loads: weights (safetensors), config, tokenizer, template, processor."""
    assert isinstance(model, PreTrainedModel)
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = list(family.eos_ids)
    model.generation_config.pad_token_id = family.pad_id
    model.save_pretrained(directory)
    family.tokenizer.save_pretrained(directory)
    family.image_processor.save_pretrained(directory)
