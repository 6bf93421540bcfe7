"""Fills the folder of a recording. All of it may be called from threads."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save

from stretto.observe.lineage import write_atomically
from stretto.recording.layout import FORMAT, IMAGES, PARTITIONS, PAYLOADS, RECORD, SCHEMA, partition_path
from stretto.recording.reader import RecordedGroup
from stretto.types import StrettoError


class Writer:
    """Writes the files of a recording; ``seal`` makes it one.

    Raises:
        StrettoError: a file cannot be written, with the reason (a full disk among them); by every method.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        with _told(folder):
            for name in (PARTITIONS, PAYLOADS, IMAGES):
                (folder / name).mkdir(parents=True, exist_ok=True)

    def image(self, content: bytes, kind: str) -> Path:
        """Stores an image file of a format (``png``); the same content once."""
        return self._store(self.folder / IMAGES, content, kind)

    def payload(self, pixel_values: np.ndarray, image_grid_thw: np.ndarray) -> str:
        """Stores what the processor made of a group's images; its name. The same content is stored once."""
        tensors = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
        content = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
        return self._store(self.folder / PAYLOADS, content, "safetensors").name

    def partition(self, groups: Sequence[tuple[RecordedGroup, str]]) -> None:
        """Writes a whole partition: its groups, each with the name of its payload, in any order."""
        rows = [row for group, payload in groups for row in _rows(group, payload)]
        rows.sort(key=lambda row: row["global_index"])
        columns = [pa.array([row[field.name] for row in rows], type=field.type, from_pandas=False) for field in SCHEMA]
        table = pa.Table.from_arrays(columns, schema=SCHEMA)
        path = partition_path(self.folder, rows[0]["partition"])
        sink = pa.BufferOutputStream()
        # A dictionary would take all NaNs for one.
        pq.write_table(table, sink, compression="zstd", use_dictionary=False)
        _write(path, sink.getvalue().to_pybytes())

    def _store(self, folder: Path, content: bytes, kind: str) -> Path:
        path = folder / f"{hashlib.sha256(content).hexdigest()}.{kind}"
        if not path.exists():
            _write(path, content)
        return path


def seal(
    folder: Path,
    *,
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    partitions: int,
    groups: int,
    n: int,
) -> None:
    """Writes ``record.json``, which makes a folder a recording.

    Args:
        config: the resolved config of the run, as plain data.
        model, data: see ``Recording``.

    Raises:
        StrettoError: a partition is missing, or the file cannot be written.
    """
    missing = [k for k in range(partitions) if not partition_path(folder, k).exists()]
    if missing:
        raise StrettoError(f"{folder}: partition {missing[0]} was not recorded, though it was trained")
    record = {
        "format": FORMAT,
        "config": dict(config),
        "model": dict(model),
        "data": dict(data),
        "partitions": partitions,
        "groups": groups,
        "n": n,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "files": _digests(folder),
    }
    _write(folder / RECORD, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def reseal(folder: Path) -> None:
    """Takes the files as they are now for what was recorded: for who changes a copy of a recording on purpose."""
    record = json.loads((folder / RECORD).read_text())
    _write(folder / RECORD, (json.dumps(record | {"files": _digests(folder)}, indent=1) + "\n").encode())


def _digests(folder: Path) -> dict[str, str]:
    with _told(folder):
        return {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for name in (PARTITIONS, PAYLOADS, IMAGES)
            for path in sorted((folder / name).iterdir())
        }


def _rows(group: RecordedGroup, payload: str) -> Iterator[dict[str, Any]]:
    record, prompt, timing = group.record, group.prompt, group.timing
    for i, (response, score) in enumerate(zip(group.responses, group.scores, strict=True)):
        yield {
            "partition": record.partition,
            "group": record.group,
            "sample": i,
            "global_index": record.global_indexes[i],
            "row_id": prompt.row_id,
            "source": prompt.source,
            "answer": prompt.answer,
            "messages": json.dumps(prompt.messages, ensure_ascii=False),
            "images": [path.name for path in group.images],
            "payload": payload,
            "prompt_ids": group.fields["prompt_ids"],
            "mm_token_type_ids": group.fields["mm_token_type_ids"],
            "response_ids": response.token_ids,
            "rollout_logprobs": response.logprobs,
            "loss_mask": group.loss_mask[i],
            "text": response.text,
            "finish_reason": response.finish_reason,
            "error": response.error,
            "reward": record.rewards[i],
            "valid": record.valid[i],
            "failure": score.failure,
            "score_error": score.error,
            "truncated": record.truncated[i],
            "version_start": record.version_start[i],
            "version_end": record.version_end[i],
            "batch": timing.batch,
            "decode_s": timing.decode_s,
            "score_s": timing.score_s,
            "put_s": timing.put_s,
        }


def _write(path: Path, content: bytes) -> None:
    with _told(path):
        write_atomically(path, content)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StrettoError(
            f"the recording cannot be written: {path}: {error.strerror or error}; make room or mend that, remove the "
            "folder, and record again"
        ) from error
