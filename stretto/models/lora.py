"""LoRA adapters (arXiv:2106.09685): put into a model by peft, published as they are or merged, saved as a peft folder.

peft is imported where adapters are made or saved, so that a run without them needs no peft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.config import Config, LoraConfig
from stretto.models.loading import DTYPES, weight_bytes, without_weights
from stretto.models.weights_io import Sendable
from stretto.types import ConfigError
from stretto.wording import nearest, shown

NAME = "default"
"""peft's name of an adapter that nobody named; part of the names of its parameters."""


def check(model: nn.Module, lora: LoraConfig) -> None:
    """Whether ``inject`` can do what ``lora`` asks for; ``model`` may be on the meta device.

    Raises:
        ConfigError: peft is not installed, or a target names no layer, one that is not linear, or one whose weight is
            shared with another layer.
    """
    if find_spec("peft") is None:
        raise ConfigError(
            [f"lora.rank = {lora.rank}: adapters need peft, which is not installed; pip install 'stretto[lora]'"]
        )
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    problems: list[str] = []
    sides: list[int] = []
    for target in lora.targets:
        where = f"lora.targets = {shown(lora.targets)}"
        found = _matches(model, target)
        odd = [name for name in found if name not in linear]
        tied = [name for name in found if name in linear and _is_tied(model, linear[name])]
        if not found:
            known = _targets(model, linear)
            problems.append(
                f"{where}: the model has no layer {target!r}; did you mean {nearest(target, known)!r}? Its linear "
                f"layers are {', '.join(known)}"
            )
        elif odd:
            problems.append(f"{where}: {odd[0]!r}, which {target!r} names, is no linear layer; leave it out")
        elif tied:
            problems.append(
                f"{where}: {tied[0]!r} shares its weight with the embeddings (tie_word_embeddings), which an adapter "
                "would change, too; leave it out"
            )
        else:
            sides += [min(linear[name].weight.shape) for name in found]
    if not problems and lora.rank > max(sides):
        problems.append(
            f"lora.rank = {lora.rank}: no layer that gets an adapter has a rank above {max(sides)}; lower it"
        )
    if problems:
        raise ConfigError(problems)


def _targets(model: nn.Module, linear: Mapping[str, nn.Linear]) -> list[str]:
    """Last parts of names that only linear layers with weights of their own have."""
    ends = {name.rpartition(".")[2] for name in linear}
    return sorted(
        end
        for end in ends
        if all(name in linear and not _is_tied(model, linear[name]) for name in _matches(model, end))
    )


def inject(model: nn.Module, lora: LoraConfig, seed: int) -> None:
    """Put adapters into ``model``, in its dtype and on its device; everything else is frozen.

    They are drawn on the CPU from ``seed``, so that every rank and engine starts with the same: A as a linear layer's
    own, B zero, which leaves the model's outputs as they are.

    Raises:
        ConfigError: as ``check``.
    """
    check(model, lora)
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_peft_config(lora), model)
    model.train(model.training)  # what was put in starts in train mode: it would drop out in every forward


def _peft_config(lora: LoraConfig, **others: Any) -> Any:
    import peft

    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # peft and others expect an integer in files
    return peft.LoraConfig(
        r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=list(lora.targets), **others
    )


def _matches(model: nn.Module, target: str) -> list[str]:
    """Names of the layers that peft takes a target for: its own name, or the end of it from a dot on."""
    return [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]


def _is_tied(model: nn.Module, layer: nn.Linear) -> bool:
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is layer.weight]
    return len(names) > 1


@dataclass(frozen=True)
class MergedWeight:
    """The weight of a layer with its adapter added, made when it is sent: base + scale * B @ A, in float32."""

    base: Tensor
    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def numel(self) -> int:
        return self.base.numel()

    @torch.no_grad()
    def detach(self) -> Tensor:
        """The float32 values, another tensor each time."""
        return self.base.float() + (self.b.float() @ self.a.float()) * self.scale


def published(model: nn.Module, config: Config) -> Mapping[str, Sendable]:
    """What engines get of a model that ``parts.prepare`` has prepared: all parameters; with adapters, all of the merged
    model under the names of a plain one, or those of the adapters alone (``lora.publish``).
    """
    if config.lora.rank == 0:
        return dict(model.named_parameters())
    if config.lora.publish == "adapter":
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    return merged(model, config.lora)


def merged(model: nn.Module, lora: LoraConfig) -> dict[str, Sendable]:
    """The parameters of the plain model that computes what ``model`` with its adapters does, up to rounding."""
    named = dict(model.named_parameters())
    result: dict[str, Sendable] = {}
    for name, parameter in named.items():
        layer, inside, rest = name.partition(".base_layer.")
        if inside and rest == "weight":
            a, b = (named[f"{layer}.lora_{half}.{NAME}.weight"] for half in "AB")
            result[f"{layer}.weight"] = MergedWeight(parameter, a, b, lora.alpha / lora.rank)
        elif inside:
            result[f"{layer}.{rest}"] = parameter
        elif f".{NAME}." not in name:
            result[name] = parameter
    return result


def published_bytes(config: Config) -> int:
    """Bytes of one version of ``published``, in ``model.dtype``. Allocates no weights."""
    if config.lora.rank == 0 or config.lora.publish == "merged":
        return weight_bytes(config.model)
    return adapter_parameters(without_weights(config.model), config.lora) * DTYPES[config.model.dtype].itemsize


def adapter_parameters(model: nn.Module, lora: LoraConfig) -> int:
    """How many parameters ``inject`` would add to a plain model."""
    layers = {name for target in lora.targets for name in _matches(model, target)}
    linear = [layer for name, layer in model.named_modules() if name in layers and isinstance(layer, nn.Linear)]
    return lora.rank * sum(layer.in_features + layer.out_features for layer in linear)


def save_adapter(model: nn.Module, config: Config, directory: Path) -> None:
    """A folder that ``peft.PeftModel.from_pretrained`` puts on the model that the run began with."""
    import peft

    directory.mkdir(parents=True, exist_ok=True)
    _peft_config(config.lora, base_model_name_or_path=config.model.path or None, inference_mode=True).save_pretrained(
        str(directory)
    )
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file(
        {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        directory / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
