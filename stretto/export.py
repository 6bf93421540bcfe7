"""A checkpoint as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from stretto.actor.checkpoint import latest_valid, problem, read_tensors
from stretto.config import Config, ModelConfig
from stretto.models.loading import load_family, load_model, save_model
from stretto.observe.manifest import read_manifest
from stretto.types import StrettoError


def export(run_dir: Path, output: Path, step: int | None = None) -> Path:
    """Write the newest whole checkpoint of a run (or that of ``step``) to ``output``; returns the checkpoint used.

    Raises:
        StrettoError: no such checkpoint, one that is not whole, or an ``output`` that is not empty.
    """
    if output.exists() and any(output.iterdir()):
        raise StrettoError(f"{output} is not empty; export to a new folder")
    transformers.utils.logging.disable_progress_bar()
    checkpoint = _checkpoint(run_dir, step)
    model_config = _model_config(run_dir)
    family, model = load_family(model_config), load_model(model_config, 0)
    masters = read_tensors(checkpoint, "masters")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(masters[name])
    save_model(family, model, output)
    return checkpoint


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


def _model_config(run_dir: Path) -> ModelConfig:
    """The model options that the run was started with: they find tokenizer, template and image processor."""
    return Config.model_validate_json(json.dumps(read_manifest(run_dir)["sessions"][-1]["config"])).model
