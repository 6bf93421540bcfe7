"""Where everything of a recording lies, and its columns.

record.json                      what it is and the SHA-256 of every other file; written last
partitions/000000.parquet        one row for each sample of a partition, sorted by global_index
payloads/<sha256>.safetensors    pixel_values and image_grid_thw of a prompt group
images/<sha256>.<format>         the image files that prompts show, as they were given
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

FORMAT = 1
RECORD = "record.json"
PARTITIONS, PAYLOADS, IMAGES = "partitions", "payloads", "images"

SCHEMA = pa.schema(
    [
        pa.field("partition", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("global_index", pa.int64(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("images", pa.list_(pa.string()), nullable=False),
        pa.field("payload", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("mm_token_type_ids", pa.list_(pa.int8()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("valid", pa.bool_(), nullable=False),
        pa.field("failure", pa.string()),
        pa.field("score_error", pa.string()),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("version_start", pa.int64(), nullable=False),
        pa.field("version_end", pa.int64(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("decode_s", pa.float64(), nullable=False),
        pa.field("score_s", pa.float64(), nullable=False),
        pa.field("put_s", pa.float64(), nullable=False),
    ]
)
"""Of a partition's file; docs/recording-format.md says what each column means."""


def partition_path(folder: Path, partition: int) -> Path:
    return folder / PARTITIONS / f"{partition:06d}.parquet"
