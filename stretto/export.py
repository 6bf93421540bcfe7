"""A checkpoint as a Hugging Face directory, or its adapters as a peft directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from torch import nn

from stretto.actor.checkpoint import latest_valid, problem, read_tensors
from stretto.actor.weights import iter_buckets
from stretto.config import Config
from stretto.models.loading import DTYPES, load_family, load_model, save_model
from stretto.models.lora import merged, save_adapter
from stretto.models.parts import prepare
from stretto.models.weights_io import load_buckets
from stretto.observe.manifest import read_manifest
from stretto.types import StrettoError


def export(run_dir: Path, output: Path, step: int | None = None, *, adapter: bool = False) -> Path:
    """Write the newest whole checkpoint of a run (or that of ``step``) to ``output``; returns the checkpoint used.

    Adapters are merged in, unless ``adapter`` asks for them alone.

    Raises:
        StrettoError: no such checkpoint, one that is not whole, an ``output`` that is not empty, or ``adapter`` of a
            run that trained none.
    """
    if output.exists() and any(output.iterdir()):
        raise StrettoError(f"{output} is not empty; export to a new folder")
    transformers.utils.logging.disable_progress_bar()
    checkpoint = _checkpoint(run_dir, step)
    config = _config(run_dir)
    if adapter and config.lora.rank == 0:
        raise StrettoError(f"{run_dir} trained all weights (lora.rank = 0), no adapter; export it without --adapter")
    family, model = load_family(config.model), load_model(config.model, config.run.seed)
    prepare(model, family, config)
    masters = read_tensors(checkpoint, "masters")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(masters[name])
    if adapter:
        save_adapter(model, config, output)
    else:
        save_model(family, _plain(model, config), output)
    return checkpoint


def _plain(model: nn.Module, config: Config) -> nn.Module:
    """The model as engines hold it when adapters are published merged."""
    if config.lora.rank == 0:
        return model
    plain = load_model(config.model, config.run.seed)
    load_buckets(plain, iter_buckets(merged(model, config.lora), 0, DTYPES[config.model.dtype]))
    return plain


def _checkpoint(run_dir: Path, step: int | None) -> Path:
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        raise StrettoError(f"{run_dir} is not the folder of a run that has saved a checkpoint; name its run.dir")
    if step is None:
        found = latest_valid(folder)
        if found.path is None:
            reasons = "".join(f"\n  {path.name}: {why}" for path, why in found.passed_over)
            raise StrettoError(f"{run_dir} holds no whole checkpoint{reasons}")
        return found.path
    path = folder / f"step_{step:06d}"
    why = problem(path) if path.is_dir() else "there is no such checkpoint"
    if why:
        there = ", ".join(sorted(p.name for p in folder.glob("step_*"))) or "none"
        raise StrettoError(f"{path} cannot be exported: {why}; checkpoints there: {there}")
    return path


def _config(run_dir: Path) -> Config:
    """The options that the run was started with: they find tokenizer, image processor and what was not trained."""
    return Config.model_validate_json(json.dumps(read_manifest(run_dir)["sessions"][-1]["config"]))
