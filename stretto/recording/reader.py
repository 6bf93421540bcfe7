"""A recording, read back to the bit."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load

from stretto.config import Config, Seams
from stretto.recording.layout import FORMAT, IMAGES, PAYLOADS, RECORD, SCHEMA, partition_path
from stretto.types import GroupFields, GroupRecord, Prompt, Response, Score, StrettoError

KEPT_PARTITIONS = 3
"""Tables that are kept in memory; groups of a partition are asked for one by one."""


@dataclass(frozen=True, kw_only=True)
class RecordedPrompt(Prompt):
    """A prompt that knows where in the recording it stands. Its images are files (``RecordedGroup.images``): ``images``
    is empty until ``data.recorded`` opens them.
    """

    partition: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a group took.

    batch     index of its decode batch within the partition
    decode_s  seconds that the engine took for the whole batch
    score_s   seconds until its rewards were there, waiting for a reward process included
    put_s     when it was put, in seconds since the partition's turn began
    """

    batch: int
    decode_s: float
    score_s: float
    put_s: float


@dataclass(frozen=True, kw_only=True)
class RecordedGroup:
    """One prompt group, as it was put into the data plane. Lists have one entry per sample, in sample order.

    ``fields`` are those of ``types.GROUP_FIELDS``, ``images`` the files of the prompt's images, ``loss_mask`` uint8 [R]
    arrays: 1 where the token was to be trained.
    """

    record: GroupRecord
    fields: GroupFields
    prompt: RecordedPrompt
    images: tuple[Path, ...]
    responses: list[Response]
    scores: list[Score]
    loss_mask: list[np.ndarray]
    timing: Timing


class Recording:
    """A finished recording: partitions 0 … ``partitions - 1`` of ``groups`` prompt groups with ``n`` samples each.

    Attributes:
        config: the options of the run that was recorded, without seams.
        model: ``fingerprint`` of all version-0 parameters (16 hex digits); ``parameters``: that of those trained.
        data: what its manifest said of the training data.
        digest: SHA-256 (hex) of ``record.json``, which holds that of every other file: equal digests, equal content.

    Every file is held against its SHA-256 when it is read.
    """

    def __init__(self, path: Path | str):
        """Raises StrettoError where there is no recording, an unfinished one, or one of another format."""
        self.path = Path(path)
        content = _record(self.path)
        self.digest = hashlib.sha256(content).hexdigest()
        try:
            record = json.loads(content)
            if not isinstance(record, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise StrettoError(f"{self.path / RECORD} cannot be read ({error}); record again") from None
        if record.get("format") != FORMAT:
            raise StrettoError(
                f"{self.path} is a recording of format {record.get('format')!r}, this version of stretto reads format "
                f"{FORMAT}; record again"
            )
        try:
            self.config = Config.model_validate_json(json.dumps(record["config"])).model_copy(update={"seams": Seams()})
            self.partitions, self.groups, self.n = int(record["partitions"]), int(record["groups"]), int(record["n"])
            self.model: dict[str, Any] = record["model"]
            self.data: dict[str, Any] = record["data"]
            self.created: str = record["created"]
            self.files: dict[str, str] = record["files"]
        except (KeyError, TypeError, ValidationError) as error:
            raise StrettoError(
                f"{self.path / RECORD} does not say what this version of stretto asks of it: {error!r}; record again"
            ) from None
        self._table = lru_cache(KEPT_PARTITIONS)(self._read_table)

    def prompt(self, partition: int, group: int) -> tuple[RecordedPrompt, tuple[Path, ...]]:
        """The prompt of a group and the files of its images. Reads no payload. Raises StrettoError as ``group``."""
        return self._prompt(self._rows(partition, group)[0])

    def _prompt(self, row: dict[str, Any]) -> tuple[RecordedPrompt, tuple[Path, ...]]:
        prompt = RecordedPrompt(
            row_id=row["row_id"],
            messages=tuple(json.loads(row["messages"])),
            answer=row["answer"],
            source=row["source"],
            partition=row["partition"],
            group=row["group"],
        )
        return prompt, tuple(self.path / IMAGES / name for name in row["images"])

    def group(self, partition: int, group: int) -> RecordedGroup:
        """Raises StrettoError where the recording has no such group, or a file that is missing or has changed."""
        rows = self._rows(partition, group)
        prompt, images = self._prompt(rows[0])
        fields = self._payload(rows[0]["payload"])
        responses = [_response(row) for row in rows]
        fields |= {
            "prompt_ids": np.asarray(rows[0]["prompt_ids"], np.int32),
            "mm_token_type_ids": np.asarray(rows[0]["mm_token_type_ids"], np.int8),
            "response_ids": [response.token_ids for response in responses],
            "rollout_logprobs": [response.logprobs for response in responses],
        }
        record = GroupRecord(
            partition=partition,
            group=group,
            row_id=prompt.row_id,
            prompt_tokens=len(fields["prompt_ids"]),
            patches=len(fields["pixel_values"]),
            images=len(fields["image_grid_thw"]),
            response_tokens=tuple(len(response.token_ids) for response in responses),
            rewards=tuple(row["reward"] for row in rows),
            valid=tuple(row["valid"] for row in rows),
            truncated=tuple(row["truncated"] for row in rows),
            version_start=tuple(row["version_start"] for row in rows),
            version_end=tuple(row["version_end"] for row in rows),
        )
        return RecordedGroup(
            record=record,
            fields=fields,
            prompt=prompt,
            images=images,
            responses=responses,
            scores=[_score(row) for row in rows],
            loss_mask=[np.asarray(row["loss_mask"], np.uint8) for row in rows],
            timing=_timing(rows[0]),
        )

    def scores(self, partition: int, group: int) -> tuple[list[Score], Timing]:
        """The scores of a group and its times. Reads no payload. Raises StrettoError as ``group``."""
        rows = self._rows(partition, group)
        return [_score(row) for row in rows], _timing(rows[0])

    def batches(self, partition: int) -> dict[int, tuple[float, int]]:
        """Of each decode batch, the seconds that it took and how many of its groups are recorded."""
        table = self._table(partition)
        found: dict[int, tuple[float, int]] = {}
        for at in range(0, table.num_rows, self.n):
            batch, decode_s = table["batch"][at].as_py(), table["decode_s"][at].as_py()
            found[batch] = decode_s, found.get(batch, (0.0, 0))[1] + 1
        return found

    def _rows(self, partition: int, group: int) -> list[dict[str, Any]]:
        """The rows of a group, as Python values but for the lists of numbers, which are arrays."""
        if not (0 <= partition < self.partitions and 0 <= group < self.groups):
            raise StrettoError(
                f"{self.path} has no partition {partition}, group {group}; it holds {self.partitions} partitions of "
                f"{self.groups} groups"
            )
        part = self._table(partition).slice(group * self.n, self.n)
        rows = [{name: _value(part[name][i]) for name in part.column_names} for i in range(self.n)]
        for i, row in enumerate(rows):
            if (row["partition"], row["group"], row["sample"]) != (partition, group, i):
                raise StrettoError(
                    f"{partition_path(self.path, partition)}: row {group * self.n + i} is sample {row['sample']} of "
                    f"group {row['group']}, partition {row['partition']}; rows are sorted by global_index, each once"
                )
        return rows

    def _read_table(self, partition: int) -> pa.Table:
        path = partition_path(self.path, partition)
        try:
            table = pq.read_table(io.BytesIO(self._read(path)))
        except (pa.ArrowInvalid, OSError) as error:
            raise StrettoError(f"{path} cannot be read: {error}; record again") from None
        if table.schema.names != SCHEMA.names or table.num_rows != self.groups * self.n:
            raise StrettoError(
                f"{path} has {table.num_rows} rows of the columns {', '.join(table.schema.names)}; a partition has "
                f"{self.groups * self.n} rows of {', '.join(SCHEMA.names)}"
            )
        return table

    def _payload(self, name: str) -> GroupFields:
        path = self.path / PAYLOADS / name
        try:
            tensors = load(self._read(path))
            return {name: tensors[name] for name in ("pixel_values", "image_grid_thw")}
        except (SafetensorError, KeyError) as error:
            raise StrettoError(f"{path} cannot be read: {error!r}; record again") from None

    def check_file(self, path: Path) -> None:
        """Raises StrettoError where a file of the recording is missing or has changed since it was recorded."""
        self._read(path)

    def _read(self, path: Path) -> bytes:
        name = path.relative_to(self.path).as_posix()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StrettoError(f"{path}, which is part of the recording, cannot be read: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != self.files.get(name):
            raise StrettoError(f"{path} is not what was recorded: its content has changed; record again")
        return content


def _record(folder: Path) -> bytes:
    try:
        return (folder / RECORD).read_bytes()
    except OSError:
        begun = partition_path(folder, 0).parent.exists()
        what = "an unfinished recording: it was interrupted" if begun else "no recording"
        raise StrettoError(f"{folder} holds {what} (there is no {RECORD}); make one by stretto parity record") from None


def _value(scalar: pa.Scalar) -> Any:
    """Numbers in lists stay arrays: as Python floats they would lose the bits of a NaN."""
    if isinstance(scalar, pa.ListScalar) and not pa.types.is_string(scalar.type.value_type):
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _score(row: dict[str, Any]) -> Score:
    return Score(value=row["reward"], valid=row["valid"], error=row["score_error"], failure=row["failure"])


def _timing(row: dict[str, Any]) -> Timing:
    return Timing(batch=row["batch"], decode_s=row["decode_s"], score_s=row["score_s"], put_s=row["put_s"])


def _response(row: dict[str, Any]) -> Response:
    return Response(
        token_ids=np.asarray(row["response_ids"], np.int32),
        logprobs=np.asarray(row["rollout_logprobs"], np.float32),
        text=row["text"],
        finish_reason=row["finish_reason"],
        version_start=row["version_start"],
        version_end=row["version_end"],
        error=row["error"],
    )
