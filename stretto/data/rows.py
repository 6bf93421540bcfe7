"""From a row of a file to a prompt: which column means what, and every way in which a row can be unusable."""

from __future__ import annotations

import decimal
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.config import DataConfig
from stretto.data.images import Images
from stretto.data.tables import BadRow
from stretto.types import Prompt

PLACEHOLDER = "<image>"
_OWN = ("image", "image_url", "path", "bytes")
"""Keys under which an image part may hold its own image."""


def columns(cfg: DataConfig) -> frozenset[str]:
    """The columns that are read."""
    named = (cfg.prompt_column, cfg.images_column, cfg.answer_column, cfg.source_column, cfg.id_column)
    return frozenset(filter(None, named))


def row_id(row: Mapping[str, Any], cfg: DataConfig) -> str | None:
    """The id that the row brings; None where it brings none.

    Raises:
        BadRow: ``data.id_column`` is set, and the row has neither text nor an integer there.
    """
    if not cfg.id_column:
        return None
    value = row.get(cfg.id_column)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow(f"its id (column {cfg.id_column!r}) is {_kind(value)}; ids are text or integers")
    return _text(str(value), "id")


def to_prompt(row: Mapping[str, Any], cfg: DataConfig, row_id: str, source: str, folder: Path) -> Prompt:
    """The prompt of a row; its images stay where they are until they are asked for.

    Args:
        source: what the row says of its source where no column does.
        folder: of relative image paths.

    Raises:
        BadRow: what is there cannot be used; images are not looked into yet.
    """
    given = _images_column(row, cfg)
    messages, images = _messages(row, cfg, given)
    if cfg.source_column:
        value = row.get(cfg.source_column)
        source = "" if value is None else _text(as_text(value, cfg.source_column), f"column {cfg.source_column!r}")
    return Prompt(
        row_id=row_id,
        messages=messages,
        images=Images(images, row_id, folder),
        answer=_answer(row, cfg),
        source=source,
    )


def as_text(value: Any, column: str) -> str:
    """Text as it is, numbers as digits, lists and tables as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, decimal.Decimal):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"column {column!r} holds {_kind(value)}, which has no text ({error})") from error


def _answer(row: Mapping[str, Any], cfg: DataConfig) -> str:
    if not cfg.answer_column:
        return ""
    value = row.get(cfg.answer_column)
    if value is None:
        raise BadRow(
            f"no answer (column {cfg.answer_column!r}); where no row has one, set data.answer_column to an empty string"
        )
    return _text(as_text(value, cfg.answer_column), f"column {cfg.answer_column!r}")


def _images_column(row: Mapping[str, Any], cfg: DataConfig) -> list[Any]:
    """None, an empty list and a missing column mean the same. One image alone needs no list, but a mapping does: it may
    as well be a whole row, or a column of another meaning.
    """
    value = row.get(cfg.images_column) if cfg.images_column else None
    if value is None:
        return []
    if isinstance(value, str | bytes):
        return [value]
    if isinstance(value, list):
        return value
    raise BadRow(f"column {cfg.images_column!r} is {_kind(value)} where a list of images is due; write [...] around it")


def _messages(row: Mapping[str, Any], cfg: DataConfig, given: list[Any]) -> tuple[tuple[dict, ...], list[Any]]:
    """Messages in the form of ``Prompt``, and the images of their places in order."""
    prompt = row.get(cfg.prompt_column)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, list):
        raise BadRow(
            f"the prompt (column {cfg.prompt_column!r}) is {_kind(prompt)}; it is a string, or a list of messages "
            "{role, content}"
        )
    if not prompt:
        raise BadRow(f"the prompt (column {cfg.prompt_column!r}) has no message")
    parts = [_parts(message, f"message {i}") for i, message in enumerate(prompt, 1)]
    if given and not any(_is_place(part) for content in parts for part in content):
        _put_first(prompt, parts, len(given))
    images = _fill(parts, given)
    if prompt[-1]["role"] == "assistant":
        raise BadRow("its last message is the assistant's; a prompt ends before the answer, which has its own column")
    if not images and not any(part["text"].strip() for content in parts for part in content):
        raise BadRow("the prompt is empty")
    messages = [
        {k: v for k, v in message.items() if v is not None} | {"content": [_plain(p) for p in content]}
        for message, content in zip(prompt, parts, strict=True)
    ]
    try:
        json.dumps(messages, allow_nan=False)  # as rewards are told of them
    except (TypeError, ValueError) as error:
        raise BadRow(f"its messages hold more than text, numbers, lists and tables ({error})") from error
    return tuple(messages), images


def _parts(message: Any, where: str) -> list[dict[str, Any]]:
    """The content of a message as parts; ``<image>`` in a string is a place for an image."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        keys = f" with the keys {', '.join(map(str, message))}" if isinstance(message, Mapping) else ""
        raise BadRow(f"{where} is {_kind(message)}{keys}; a message is {{role, content}}")
    content = message.get("content")
    if isinstance(content, str):
        pieces = _text(content, where).split(PLACEHOLDER)
        parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
        for piece in pieces[1:]:
            parts += [{"type": "image"}, {"type": "text", "text": piece}]
        return [part for part in parts if part["type"] == "image" or part["text"]]
    if isinstance(content, list):
        return [_part(part, f"{where}, part {i}") for i, part in enumerate(content, 1)]
    raise BadRow(f"{where}: its content is {_kind(content)}; it is a string, or a list of parts")


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise BadRow(f"{where}: its text is {_kind(part.get('text'))}")
        return {"type": "text", "text": _text(part["text"], where)}
    if kind not in ("image", "image_url"):
        raise BadRow(f"{where} is {_kind(part)} of type {kind!r}; parts are {{type: text, text}} and {{type: image}}")
    own = [key for key in _OWN if part.get(key) is not None]
    if not own:
        return {"type": "image"}
    if set(own) == {"bytes", "path"}:
        return {"type": "image", "own": {"bytes": part["bytes"], "path": part["path"]}}
    if len(own) > 1:
        raise BadRow(f"{where} names its image {len(own)} times ({', '.join(own)}); keep one of them")
    image = part[own[0]]
    if own[0] == "image_url" and isinstance(image, Mapping):
        image = image.get("url")
    return {"type": "image", "own": image}


def _is_place(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image"


def _put_first(prompt: Sequence[Mapping[str, Any]], parts: list[list[dict[str, Any]]], count: int) -> None:
    """Images that no message has a place for go before the text of the first user message, where all are strings."""
    users = [i for i, message in enumerate(prompt) if message["role"] == "user"]
    if users and all(isinstance(message["content"], str) for message in prompt):
        parts[users[0]][:0] = [{"type": "image"} for _ in range(count)]


def _fill(parts: list[list[dict[str, Any]]], given: list[Any]) -> list[Any]:
    """The images of all places in order: a part's own, else the next of the images column."""
    places = [part for content in parts for part in content if _is_place(part)]
    free = sum("own" not in part for part in places)
    if free != len(given):
        raise BadRow(
            f"{len(given)} image(s) for {free} place(s) in the messages; a place is {PLACEHOLDER} in a string, or a "
            "part {type: image} without an image of its own"
        )
    rest = iter(given)
    return [part["own"] if "own" in part else next(rest) for part in places]


def _plain(part: Mapping[str, Any]) -> dict[str, str]:
    return {"type": "image"} if _is_place(part) else {"type": "text", "text": part["text"]}


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{where}: text that is no Unicode: half of a surrogate pair at {error.start}") from error
    return text


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
