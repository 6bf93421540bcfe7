"""Models from a local directory, a hub id, or a config block; and back to a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stretto.config import ModelConfig
from stretto.models.qwen3_vl import Qwen3VL
from stretto.models.tokenizer import build_tokenizer
from stretto.types import ConfigError

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
    try:
        config = AutoConfig.from_pretrained(cfg.path)
        tokenizer = AutoTokenizer.from_pretrained(cfg.path)
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(cfg.path, size=size)
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                f"model.path = {cfg.path!r}: cannot be loaded ({_first_line(error)}); give a directory that holds "
                "config.json, the tokenizer, preprocessor_config.json and safetensors weights (`stretto export` and "
                "`stretto sft` write one), or the id of a Qwen3-VL on the hub"
            ]
        ) from error
    _check_fit(cfg, config, tokenizer, image_processor)
    return FAMILIES[config.model_type](config, tokenizer, image_processor, _eos_ids(cfg.path, config, tokenizer))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


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
    unknown = set(block) - {"text", "vision", "tie_word_embeddings"}
    if unknown:
        raise ConfigError(
            [
                f"model.config.{key}: unknown; the block holds the tables `text` and `vision` (names of transformers' "
                "Qwen3VLTextConfig and Qwen3VLVisionConfig) and `tie_word_embeddings`"
                for key in sorted(unknown)
            ]
        )
    text = {"vocab_size": len(tokenizer)} | dict(block.get("text", {}))
    vision = dict(block.get("vision", {}))
    if text["vocab_size"] < len(tokenizer):
        raise ConfigError(
            [f"model.config.text.vocab_size = {text['vocab_size']}: the tokenizer has {len(tokenizer)} ids; raise it"]
        )
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
    except (ValueError, TypeError, KeyError) as error:
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
    """Bytes of one published version of the model: every parameter once, in ``cfg.dtype``. Allocates none of them."""
    config = AutoConfig.from_pretrained(cfg.path) if cfg.path else _config_from_block(cfg.config, build_tokenizer())
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    return sum(p.numel() for p in model.parameters()) * DTYPES[cfg.dtype].itemsize


def save_model(family: Qwen3VL, model: nn.Module, directory: Path) -> None:
    """A directory that ``from_pretrained`` loads: weights (safetensors), config, tokenizer, template, processor."""
    assert isinstance(model, PreTrainedModel)
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = list(family.eos_ids)
    model.generation_config.pad_token_id = family.pad_id
    model.save_pretrained(directory)
    family.tokenizer.save_pretrained(directory)
    family.image_processor.save_pretrained(directory)
