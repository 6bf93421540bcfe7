"""Payloads of prompt groups: checked against the declared fields, and laid out as few contiguous arrays.

A packed group holds one array for each field. A per-sample column is one array of all samples' values on end, with
their lengths beside it under ``<field>/lengths``; reading it gives views, so nothing is copied. Per-group columns
are stored once: the first sample of the group owns them, its siblings refer to them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from stretto.plane.protocol import MissingField, Overfilled, Underfilled, UnknownField, WrongDtype, WrongShape
from stretto.types import GROUP_FIELDS, WRITE_BACK_FIELDS, FieldSpec, GroupFields, GroupRecord

Payload = dict[str, np.ndarray]

LENGTHS = "/lengths"
_GROUP = {spec.name: spec for spec in GROUP_FIELDS}
_WRITE_BACK = {spec.name: spec for spec in WRITE_BACK_FIELDS}


def check_group(record: GroupRecord, fields: GroupFields, place: str) -> None:
    """Checks a group's fields against types.GROUP_FIELDS and against its record.

    Raises UnknownField, MissingField, WrongDtype, WrongShape; Underfilled or Overfilled for a column with another
    number of samples than the record. ``place`` opens every message.
    """
    for name in fields:
        if name not in _GROUP:
            raise UnknownField(f"{place}: {name!r} is no field of a group{_suggestion(name, _GROUP)}")
    if missing := [name for name in _GROUP if name not in fields]:
        raise MissingField(f"{place}: {_quoted(missing)} missing; a group is written whole, with all of its fields")
    for name, spec in _GROUP.items():
        value = fields[name]
        if spec.per == "group":
            check_array(value, spec, f"{place}, field {name!r}")
            continue
        if not isinstance(value, list | tuple):
            raise WrongShape(
                f"{place}, field {name!r}: is {_type(value)}; hand over a list with one array for each of the "
                f"{record.n} samples"
            )
        if len(value) != record.n:
            error = Underfilled if len(value) < record.n else Overfilled
            raise error(f"{place}, field {name!r}: {len(value)} samples, the record has {record.n}; write whole groups")
        for sample, array in zip(record.global_indexes, value, strict=True):
            check_array(array, spec, f"{place}, field {name!r}, sample {sample}")
    _check_lengths(record, fields, place)


def _check_lengths(record: GroupRecord, fields: Mapping[str, Any], place: str) -> None:
    """The record is what schedules are made of: it must say what the arrays hold."""
    for name in ("response_ids", "rollout_logprobs"):
        for sample, array, length in zip(record.global_indexes, fields[name], record.response_tokens, strict=True):
            if len(array) != length:
                raise WrongShape(
                    f"{place}, field {name!r}, sample {sample}: {len(array)} entries, the record has {length} response "
                    "tokens; every sampled token needs exactly one id and one log-prob"
                )
    grid = fields["image_grid_thw"]
    for name, found, recorded, what in (
        ("prompt_ids", len(fields["prompt_ids"]), record.prompt_tokens, "prompt tokens"),
        ("mm_token_type_ids", len(fields["mm_token_type_ids"]), record.prompt_tokens, "prompt tokens"),
        ("pixel_values", len(fields["pixel_values"]), record.patches, "patches"),
        ("image_grid_thw", len(grid), record.images, "images"),
        ("image_grid_thw", int(grid.astype(np.int64).prod(axis=1).sum()), record.patches, "patches"),
    ):
        if found != recorded:
            raise WrongShape(
                f"{place}, field {name!r}: {found} {what}, the record has {recorded}; build the record from the "
                "arrays that are put"
            )


def check_array(value: Any, spec: FieldSpec, place: str) -> None:
    """Raises WrongDtype or WrongShape unless ``value`` is a numpy array (or scalar) as ``spec`` declares."""
    if not isinstance(value, np.ndarray | np.generic):
        raise WrongDtype(f"{place}: is {_type(value)}, declared is a numpy array of {spec.dtype}; convert it first")
    if value.dtype != np.dtype(spec.dtype):
        raise WrongDtype(f"{place}: dtype {value.dtype}, declared is {spec.dtype}; the plane casts nothing")
    shape = value.shape
    free = all(want is None or want == have for want, have in zip(spec.shape, shape, strict=False))
    if len(shape) != len(spec.shape) or not free:
        declared = ", ".join("any" if size is None else str(size) for size in spec.shape)
        raise WrongShape(f"{place}: shape {list(shape)}, declared is [{declared}]")


def write_back_spec(field: str, place: str) -> FieldSpec:
    """The declaration of a written-back field. Raises UnknownField."""
    if field not in _WRITE_BACK:
        raise UnknownField(f"{place}: {field!r} is no field to write back{_suggestion(field, _WRITE_BACK)}")
    return _WRITE_BACK[field]


def pack_group(fields: GroupFields) -> Payload:
    """Lays a checked group out as contiguous arrays; per-group columns are not copied if they are contiguous."""
    payload: Payload = {}
    for name, spec in _GROUP.items():
        if spec.per == "group":
            payload[name] = np.ascontiguousarray(fields[name])
        else:
            payload |= pack_column(name, list(fields[name]), spec)
    return payload


def unpack_group(payload: Payload) -> GroupFields:
    """The inverse of pack_group; all arrays are views of the payload's."""
    return {
        name: payload[name] if spec.per == "group" else unpack_column(name, payload, spec)
        for name, spec in _GROUP.items()
    }


def pack_column(name: str, values: list[np.ndarray], spec: FieldSpec) -> Payload:
    """A per-sample column as one array, with ``lengths`` int32 [samples] where they may differ."""
    if not spec.shape:
        return {name: np.array(values, dtype=spec.dtype)}
    lengths = np.array([len(value) for value in values], dtype=np.int32)
    return {name: np.concatenate(values) if values else np.empty(0, spec.dtype), name + LENGTHS: lengths}


def unpack_column(name: str, payload: Payload, spec: FieldSpec) -> list[np.ndarray]:
    """The inverse of pack_column, as views."""
    values = payload[name]
    if not spec.shape:
        return [values[i : i + 1].reshape(()) for i in range(len(values))]
    ends = np.cumsum(payload[name + LENGTHS], dtype=np.int64).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def payload_bytes(payload: Payload) -> int:
    """Bytes of a packed group as the plane holds and moves them."""
    return sum(array.nbytes for array in payload.values())


def logical_bytes(payload: Payload, n_samples: int) -> int:
    """Bytes of a packed group if each sample carried its own copy of the per-group columns."""
    shared = sum(payload[name].nbytes for name, spec in _GROUP.items() if spec.per == "group")
    return payload_bytes(payload) + (n_samples - 1) * shared


def estimate_group_bytes(
    *, prompt_tokens: int, patches: int, images: int, n_samples: int, response_tokens: int, values_per_patch: int
) -> int:
    """Bytes of a packed group of this size, for the capacity check at start-up; ``response_tokens`` is per sample."""
    prompt = prompt_tokens * (4 + 1) + patches * values_per_patch * 4 + images * 3 * 4
    return prompt + n_samples * (response_tokens * (4 + 4) + 2 * 4)


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{meant} Declared are {', '.join(names)}"


def _quoted(names: Iterable[str]) -> str:
    words = [repr(name) for name in names]
    return ", ".join(words) + (" is" if len(words) == 1 else " are")


def _type(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__name__}".replace("builtins.", "")
