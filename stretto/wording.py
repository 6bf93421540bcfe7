"""How values, forms and names are worded in messages about options. Importing this module loads no torch, ray or
transformers.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

LONGEST_SHOWN = 120


def shown(value: Any) -> str:
    """A value as a recipe would hold it, cut where it is long."""
    if value is None:
        text = "unset"
    elif isinstance(value, str | bool):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {shown(item)}" for key, item in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


@dataclass(frozen=True)
class Given:
    """A value and the source that it came from."""

    value: Any
    origin: str

    def __str__(self) -> str:
        return f"{shown(self.value)} ({self.origin})"


def _bounds(metadata: Iterable[Any]) -> str:
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
    found = [f"{word} {getattr(m, name)}" for name, word in words.items() for m in metadata if hasattr(m, name)]
    return (" " + " and ".join(found)) if found else ""


def form(annotation: Any, metadata: Sequence[Any] = (), many: bool = False) -> str:
    """What a field accepts, in words: the remedy that every error about its value ends with."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for extra in args[1:] for m in getattr(extra, "metadata", [extra])]
        return form(args[0], [*metadata, *inner], many)
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in args)
    if origin in (Union, UnionType):
        return form(next(a for a in args if a is not NoneType), metadata, many)
    if origin in (tuple, list):
        count = "" if origin is list or args[-1] is Ellipsis else f"{len(args)} "
        return f"a list of {count}{form(args[0], metadata, many=True)}"
    if origin is dict:
        return "a table"
    if annotation is bool:
        return "true or false"
    noun = {int: "integer", float: "number", str: "string"}[annotation]
    article = "an" if noun == "integer" else "a"
    return (f"{noun}s" if many else f"{article} {noun}") + _bounds(metadata)


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidate that a misspelled name is most like."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    return by_lower[difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.0)[0]]
