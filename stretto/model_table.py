"""What ``[model.config]`` may hold: the sizes of a Qwen3-VL with random weights, in transformers' names.

Everything here is decided from numbers alone, before transformers is asked. Sizes have no default: transformers' own
are those of a full model, and a key left out would quietly build one of billions of parameters. Importing this module
loads no torch, ray or transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from stretto.config import Block, Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from stretto.types import ConfigError
from stretto.wording import form, nearest, shown

Integers = Annotated[list[NonNegativeInt], BeforeValidator(lambda v: list(v) if isinstance(v, tuple) else v)]
NAME = "model.config"
EXAMPLE = "docs/models.md has an example"


class Rope(Block):
    """Rotary positions of the text model."""

    rope_type: Literal["default"] = "default"
    rope_theta: PositiveFloat = 500000.0
    mrope_section: Integers
    mrope_interleaved: Literal[True] = True


class Text(Block):
    """``Qwen3VLTextConfig``."""

    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    rope_parameters: dict[str, Any]
    vocab_size: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 128000
    hidden_act: str = "silu"
    initializer_range: NonNegativeFloat = 0.02
    rms_norm_eps: PositiveFloat = 1e-6
    attention_bias: bool = False
    attention_dropout: Decay = 0.0
    use_cache: bool = True
    pad_token_id: NonNegativeInt | None = None


class Vision(Block):
    """``Qwen3VLVisionConfig``."""

    hidden_size: PositiveInt
    depth: PositiveInt
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    out_hidden_size: PositiveInt
    num_position_embeddings: PositiveInt
    deepstack_visual_indexes: Integers
    patch_size: PositiveInt = 16
    spatial_merge_size: PositiveInt = 2
    temporal_patch_size: PositiveInt = 2
    in_channels: int = Field(3, ge=3, le=3)
    hidden_act: str = "gelu_pytorch_tanh"
    initializer_range: NonNegativeFloat = 0.02


class Table(Block):
    """The whole table."""

    text: dict[str, Any]
    vision: dict[str, Any]
    tie_word_embeddings: bool = True


OTHER_NAMES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth", "rope_scaling": "rope_parameters"}
"""Names that mean a key by another one, of the text half or of older releases."""


class _Checker:
    """Gathers problems as (dotted name, message)."""

    def __init__(self, origins: Mapping[str, str]):
        self.origins = origins
        self.found: list[tuple[str, str]] = []

    def refuse(self, name: str, value: Any, why: str) -> None:
        """``name`` without the ``model.config.`` in front."""
        full = f"{NAME}.{name}"
        origin = self.origins.get(full) or self.origins.get(NAME)
        read = f"{full} = {shown(value)}" if value is not None else full
        self.found.append((full, f"{read}{f' ({origin})' if origin else ''}: {why}"))

    def fields(self, model: type[Block], table: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
        """The table with its defaults; None, with a problem for each entry that is wrong, where it can not be used."""
        try:
            return model.model_validate(dict(table)).model_dump()
        except ValidationError as error:
            kinds = {str(e["loc"][0]): e["type"] for e in error.errors()}
            meant = {key: _meant(model, key) for key, kind in kinds.items() if kind == "extra_forbidden"}
            for key, near in meant.items():
                self.refuse(f"{prefix}{key}", table[key], f"no such key; did you mean {NAME}.{prefix}{near}?")
            for key, kind in kinds.items():
                if key not in meant and not (kind == "missing" and key in meant.values()):
                    self._field(model, table, prefix, key, kind)
        return None

    def _field(self, model: type[Block], table: Mapping[str, Any], prefix: str, key: str, kind: str) -> None:
        known, name = model.model_fields, f"{prefix}{key}"
        accepted = form(known[key].annotation, known[key].metadata)
        if key == "in_channels":
            accepted = "3, since images are RGB"
        if kind == "missing":
            self.refuse(name, None, f"missing; expected {accepted}: its default would be a full model's ({EXAMPLE})")
        else:
            self.refuse(name, table[key], f"expected {accepted}")


def _meant(model: type[Block], key: str) -> str:
    near = OTHER_NAMES.get(key, "")
    return near if near in model.model_fields else nearest(key, model.model_fields)


def problems(table: Mapping[str, Any] | None, origins: Mapping[str, str]) -> list[tuple[str, str]]:
    """Everything wrong with ``[model.config]``, each as (dotted name, message with value and remedy).

    ``origins`` says where values came from, by dotted name; nothing is said of those that it lacks.
    """
    checker = _Checker(origins)
    if table is None:
        return []
    top = checker.fields(Table, table, "")
    halves: dict[str, dict[str, Any] | None] = {}
    for key, model in (("text", Text), ("vision", Vision)):
        value = table.get(key)
        halves[key] = checker.fields(model, value, f"{key}.") if isinstance(value, Mapping) else None
    text, vision = halves["text"], halves["vision"]
    rope = table["text"].get("rope_parameters") if isinstance(table.get("text"), Mapping) else None
    rope = checker.fields(Rope, rope, "text.rope_parameters.") if isinstance(rope, Mapping) else None
    if text:
        _check_text(checker, text, rope)
    if vision:
        _check_vision(checker, vision)
    if text and vision and top is not None:
        _check_both(checker, text, vision)
    return checker.found


def check(table: Mapping[str, Any]) -> None:
    """Raise ConfigError with everything wrong with ``[model.config]``."""
    found = problems(table, {})
    if found:
        raise ConfigError([text for _, text in found])


def _check_text(checker: _Checker, text: dict[str, Any], rope: dict[str, Any] | None) -> None:
    heads, kv, head_dim = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    if heads % kv:
        fitting = ", ".join(map(str, _divisors(heads)))
        checker.refuse(
            "text.num_key_value_heads", kv, f"num_attention_heads = {heads} is no multiple of it; use one of {fitting}"
        )
    if head_dim % 2:
        checker.refuse("text.head_dim", head_dim, f"rotary positions turn pairs; use {head_dim + 1}")
    elif rope is not None:
        _check_mrope(checker, rope["mrope_section"], head_dim)


def _check_mrope(checker: _Checker, section: list[int], head_dim: int) -> None:
    name, half = "text.rope_parameters.mrope_section", head_dim // 2
    third = half // 3
    suggestion = f"such as [{half - 2 * third}, {third}, {third}]"
    if len(section) != 3:
        checker.refuse(name, section, f"expected three integers: time, height, width; {suggestion}")
    elif sum(section) != half:
        checker.refuse(
            name, section, f"adds up to {sum(section)} instead of {half}, half of head_dim = {head_dim}; {suggestion}"
        )
    elif section[1] > (half + 1) // 3 or section[2] > third:
        checker.refuse(
            name,
            section,
            f"height and width take every third of the {half} places, so there is room for {(half + 1) // 3} and "
            f"{third}; {suggestion}",
        )


def _check_vision(checker: _Checker, vision: dict[str, Any]) -> None:
    hidden, heads = vision["hidden_size"], vision["num_heads"]
    if hidden % heads or hidden // heads % 4:
        fitting = [d for d in _divisors(hidden) if hidden // d % 4 == 0]
        remedy = f"use one of {', '.join(map(str, fitting))}" if fitting else "make hidden_size a multiple of 4"
        checker.refuse(
            "vision.num_heads",
            heads,
            f"hidden_size = {hidden} must give each head a multiple of 4, for positions in two directions; {remedy}",
        )
    positions = vision["num_position_embeddings"]
    side = math.isqrt(positions)
    if side * side != positions:
        checker.refuse(
            "vision.num_position_embeddings",
            positions,
            f"they form a square; use {side * side} or {(side + 1) ** 2}",
        )
    indexes, depth = vision["deepstack_visual_indexes"], vision["depth"]
    if indexes != sorted(set(indexes)) or any(i >= depth for i in indexes):
        checker.refuse(
            "vision.deepstack_visual_indexes",
            indexes,
            f"expected layers from 0 to {depth - 1} (depth = {depth}), each once, in rising order",
        )


def _check_both(checker: _Checker, text: dict[str, Any], vision: dict[str, Any]) -> None:
    if vision["out_hidden_size"] != text["hidden_size"]:
        checker.refuse(
            "vision.out_hidden_size",
            vision["out_hidden_size"],
            f"must equal {NAME}.text.hidden_size; use {text['hidden_size']}",
        )
    levels, layers = len(vision["deepstack_visual_indexes"]), text["num_hidden_layers"]
    if levels > layers:
        checker.refuse(
            "vision.deepstack_visual_indexes",
            vision["deepstack_visual_indexes"],
            f"each of the first text layers takes one level, and text.num_hidden_layers = {layers}; "
            f"name at most {layers}",
        )


def _divisors(number: int) -> Iterator[int]:
    return (d for d in range(1, number + 1) if number % d == 0)
