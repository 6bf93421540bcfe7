"""The plan of a campaign: a record with one canonical text, whose SHA-256 is its name. ``plan_file`` reads it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from stretto import switches
from stretto.config import Block, NonNegativeFloat, NonNegativeInt, PositiveInt
from stretto.wording import shown

BASE, LETTERS = switches.BASE, switches.LETTERS


@dataclass(frozen=True)
class Window:
    """Partitions ``first`` to ``last`` of a run, both measured, counted from 0: lines of its metrics.jsonl. Where each
    makes one optimizer update, as by default, these are updates.
    """

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def updates(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Contrast:
    """``treated`` compared with ``base``; both name conditions."""

    treated: str
    base: str

    def __str__(self) -> str:
        return f"{self.treated} over {self.base}"


class Guardrails(Block):
    """Bounds that a condition must keep whatever its speed, see ``stretto.bench.guardrails``."""

    step_p95_ratio: float = Field(1.05, ge=1, allow_inf_nan=False)
    peak_memory_gib: NonNegativeFloat = 1.0
    peak_memory_percent: NonNegativeFloat = 3.0
    workload_percent: NonNegativeFloat = 1.0

    def looser(self) -> tuple[str, ...]:
        """A line for each bound that allows more than the default one."""
        usual = type(self)()
        pairs = [(name, getattr(self, name), getattr(usual, name)) for name in type(self).model_fields]
        return tuple(f"{name} = {mine:g}, looser than {default:g}" for name, mine, default in pairs if mine > default)


class Plan(Block):
    """Everything that decides what is run and how it is judged. Keys of the file have these names.

    recipe_sha256    of the recipe's bytes; ``load_plan`` fills it in, so that an edited recipe is a changed plan
    conditions       ``B``, ``P+R`` …, or a variant; B first. A file may give ``factorial`` beside or instead: each
                     entry lists letters of which at most one is on, so [["P"], ["R", "S"]] makes B, R, S, P, P+R, P+S
    variants         condition -> options that it adds to the switches before its bracket:
                     ``"B(c=1)"`` -> {"actor.chunks_per_mini": 1}; how the same work is done, never what work
    order            blocks: B, the other conditions, B for each seed; pairs: two conditions once for each seed, which
                     with four seeds is the historical ABBAABBA
    repetitions      of every seed
    updates          of every cell
    warmup           updates at the start of every cell that no window may touch
    windows          ``first-last``, both included, from 0, disjoint; all of them together are what is measured. They
                     count partitions, as metrics.jsonl does: updates // updates of a partition
    primary          the one contrast that stands alone: [treated, base]
    contrasts        further ones, beside every other condition over B
    targets_percent  condition -> gain over B that is aimed at
    pool_size        processes of P
    settings         options that all cells share, by their dotted names
    """

    format: Literal[1] = 1
    name: str
    recipe: str
    recipe_sha256: str = ""
    conditions: tuple[str, ...]
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    order: Literal["blocks", "pairs"] = "blocks"
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]
    repetitions: PositiveInt = 1
    updates: PositiveInt
    warmup: NonNegativeInt
    windows: tuple[str, ...]
    primary: tuple[str, str]
    contrasts: tuple[tuple[str, str], ...] = ()
    targets_percent: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    pool_size: PositiveInt = 8
    guardrails: Guardrails = Field(default_factory=Guardrails)
    settings: dict[str, Any] = Field(default_factory=dict)

    @property
    def measured(self) -> tuple[Window, ...]:
        return tuple(parse_window(text) for text in self.windows)

    @property
    def primary_contrast(self) -> Contrast:
        return Contrast(*self.primary)

    @property
    def other_contrasts(self) -> tuple[Contrast, ...]:
        """Every condition over B, then those that the plan adds; without the primary one."""
        over_base = [Contrast(name, BASE) for name in self.conditions if name != BASE]
        found = dict.fromkeys([*over_base, *(Contrast(*pair) for pair in self.contrasts)])
        return tuple(contrast for contrast in found if contrast != self.primary_contrast)

    @property
    def text(self) -> str:
        """The canonical file: every field, in one order; ``parse_plan`` of it is this plan."""
        fields = self.model_dump()
        lines = [f"{key} = {toml_text(value)}" for key, value in fields.items() if not isinstance(value, dict)]
        for key, table in fields.items():
            if isinstance(table, dict):
                lines += ["", f"[{key}]", *(f"{toml_text(name)} = {toml_text(table[name])}" for name in sorted(table))]
        return "\n".join(lines) + "\n"

    @property
    def sha256(self) -> str:
        """The plan's name: of the bytes of ``text``."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def parse_window(text: str) -> Window:
    """``"10-59"``. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"{shown(text)} is no window: expected first-last, both counted from 0, such as 10-59")
    return Window(int(found[1]), int(found[2]))


def condition_sets(plan: Plan, condition: str) -> dict[str, Any]:
    """The options that make a condition: every switch, on or off, and what a variant adds."""
    letters = condition.partition("(")[0].split("+")
    return switches.options(letters, plan.pool_size) | plan.variants.get(condition, {})


def toml_text(value: Any) -> str:
    """A value as TOML on one line, in one way alone. JSON's strings are TOML's but for U+007F."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_text(key)} = {toml_text(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
