"""The records that stages hand to one another.

Every hand-off of the engine is one of these records: numpy only, frozen, and described here with shapes
and units, so that ``data``, ``rollout``, ``plane`` and ``actor`` never need to import one another.

Shape letters used throughout the code:

==  =========================================================
P   tokens of one prompt (image tokens included)
R   tokens of one response (EOS included when it was sampled)
N   image patches of one prompt group (all of its images)
D   values of one patch (3 * temporal 2 * 16 * 16 = 1536)
I   images of one prompt
B   rows of a batch
S   padded length of a batch
T   response tokens of a microbatch, concatenated in row order
V   vocabulary
==  =========================================================

Worked example. A partition of 2 prompt groups with ``n_samples_per_prompt = 2`` holds the samples with
``global_index`` 0, 1 (group 0) and 2, 3 (group 1). If group 0 asks about one 64x32 image, its prompt holds
a grid ``[[1, 2, 4]]`` (1 * 2 * 4 = 8 patches, ``pixel_values`` [8, 1536]) and 8 / merge**2 = 2 image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]
FailureKind = Literal["abstained", "raised", "timed_out", "died", "nonfinite", "unscored"]
"""Why a sample has no reward: its function returned None, raised, overran its limit, took its process down or gave NaN;
or the engine had failed or aborted the response."""
Truncated = Literal["train", "mask", "drop"]
"""What becomes of responses that were cut by length, see ``algorithm.truncated``."""
Split = Literal["train", "validation", "test", "labelled"]
"""Part of a data set; ``labelled`` is the part of ``train`` whose answers supervised training may see."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a data set, before any processing.

    ``messages`` are chat messages (``{"role": ..., "content": [{"type": "text", "text": ...}, {"type": "image"}]}``);
    every ``image`` part takes the next entry of ``images`` (uint8 RGB arrays [height, width, 3]; those of files are
    decoded when they are asked for, each time).
    """

    row_id: str
    messages: tuple[dict, ...]
    images: Sequence[np.ndarray] = ()
    answer: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessedPrompt:
    """What the processor makes of a prompt, once per prompt group.

    prompt_ids         int32   [P]
    mm_token_type_ids  int8    [P]     0 text, 1 image
    pixel_values       float32 [N, D]  [0, D] for a prompt without images
    image_grid_thw     int32   [I, 3]  patches in time, height, width; sum of products is N
    """

    prompt_ids: np.ndarray
    mm_token_type_ids: np.ndarray
    pixel_values: np.ndarray
    image_grid_thw: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Response:
    """One sampled response, as the rollout engine reports it.

    token_ids  int32   [R]  exactly the sampled ids; EOS is kept where sampled, never invented
    logprobs   float32 [R]  the one log-prob measure, under the weights of the version stamps
    text is for the reward only (never tokenised again). ``error`` is set where the engine failed or aborted.
    token_versions  int32 [R]  policy version that each token was sampled under, never falling; None: all of them under
                               ``version_start``
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    text: str
    finish_reason: FinishReason
    version_start: int
    version_end: int
    error: str | None = None
    token_versions: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward. ``valid = False`` marks a sample whose reward failed: zero loss weight, outside its group's
    statistics, counted in the metrics. ``value`` is then 0.0, ``error`` holds the reason and ``failure`` its kind.
    """

    value: float
    valid: bool = True
    error: str | None = None
    failure: FailureKind | None = None


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """The metadata of one prompt group: small, travels with every lease, and is all that scheduling,
    advantages and metrics need. Tuples have one entry per sample, in sample order.

    ``global_index`` of sample i is ``group * n + i``, unique within the partition.
    """

    partition: int
    group: int
    row_id: str
    prompt_tokens: int
    patches: int
    images: int
    response_tokens: tuple[int, ...]
    rewards: tuple[float, ...]
    valid: tuple[bool, ...]
    truncated: tuple[bool, ...]
    version_start: tuple[int, ...]
    version_end: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.response_tokens)

    @property
    def global_indexes(self) -> range:
        return range(self.group * self.n, (self.group + 1) * self.n)

    def counted(self, truncated: Truncated) -> tuple[bool, ...]:
        """Which samples' rewards count in the statistics of their group, under a policy for truncated responses."""
        return tuple(v and not (cut and truncated == "drop") for v, cut in zip(self.valid, self.truncated, strict=True))

    def trained(self, truncated: Truncated) -> tuple[bool, ...]:
        """Which samples' tokens carry loss, under a policy for truncated responses."""
        return tuple(
            v and not (cut and truncated != "train") for v, cut in zip(self.valid, self.truncated, strict=True)
        )

    @property
    def tokens(self) -> int:
        """Real tokens (prompt + response) over all samples; no padding."""
        return self.prompt_tokens * self.n + sum(self.response_tokens)


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """A declared column of the data plane. ``None`` in ``shape`` is a free dimension.

    ``per = "group"`` columns are owned by the first sample of a group and referenced by its siblings
    (owner/ref payloads): they are stored and moved once.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    per: Literal["group", "sample"]


GROUP_FIELDS: tuple[FieldSpec, ...] = (
    FieldSpec(name="prompt_ids", dtype="int32", shape=(None,), per="group"),
    FieldSpec(name="mm_token_type_ids", dtype="int8", shape=(None,), per="group"),
    FieldSpec(name="pixel_values", dtype="float32", shape=(None, None), per="group"),
    FieldSpec(name="image_grid_thw", dtype="int32", shape=(None, 3), per="group"),
    FieldSpec(name="response_ids", dtype="int32", shape=(None,), per="sample"),
    FieldSpec(name="rollout_logprobs", dtype="float32", shape=(None,), per="sample"),
)
"""What a producer writes, all of it at once, for every prompt group."""

WRITE_BACK_FIELDS: tuple[FieldSpec, ...] = (
    FieldSpec(name="old_logprobs", dtype="float32", shape=(None,), per="sample"),
    FieldSpec(name="advantages", dtype="float32", shape=(), per="sample"),
)
"""What a consumer may write back to samples that exist."""

GroupFields = dict[str, "np.ndarray | list[np.ndarray]"]
"""The payload of one group: a ``per = "group"`` column is one array, a ``per = "sample"`` column a list of n."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Samples laid out for one forward, as ``global_index`` in row order.

    ``inert`` microbatches fill a data-parallel rank up to its siblings' count: a real sample masked out,
    counted nowhere.
    """

    samples: tuple[int, ...]
    inert: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkSchedule:
    """The recorded schedule of one chunk: ``ranks[dp][i]`` is the i-th microbatch of data-parallel rank dp.

    Every rank has equally many microbatches. ``layout``: ``padded`` has a row of prompt + response for every sample;
    ``shared`` has each prompt once, and a row for every response. ``fill`` is real tokens / laid-out tokens over all
    microbatches.
    """

    chunk: int
    groups: tuple[int, ...]
    layout: Literal["padded", "shared"]
    ranks: tuple[tuple[Microbatch, ...], ...]
    fill: float


@dataclass(frozen=True, kw_only=True)
class Mini:
    """The samples of one optimizer update: its chunks, in order."""

    partition: int
    index: int
    chunks: tuple[ChunkSchedule, ...]

    def microbatches(self, rank: int) -> list[Microbatch]:
        return [m for chunk in self.chunks for m in chunk.ranks[rank]]


@dataclass(frozen=True)
class ForwardReport:
    """Phase 1 of one chunk on one rank: when its forwards began and ended (seconds of the wall clock), and the bytes of
    payload that it fetched for them.
    """

    begun_s: float
    ended_s: float
    fetched_bytes: int


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """One tensor of a published or exported model; ``shard`` is (index, count) along dim 0."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: tuple[int, int] = (0, 1)


@dataclass(frozen=True, kw_only=True)
class WeightBucket:
    """A few tensors of one policy version. ``data`` are C-contiguous arrays in ``metas`` order; bfloat16
    travels as uint16 bits, since numpy has no such type.
    """

    version: int
    index: int
    count: int
    metas: tuple[TensorMeta, ...]
    data: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceWeights:
    """A policy version that lies in one buffer of GPU memory of the actor; takes the place of all of its buckets.

    Tensor i (``metas``) begins at byte ``offsets[i]`` of ``size``. ``sample``: values by which an engine can be checked
    (``models.weight_sample``). ``handles``: CUDA IPC handles of the buffer by the
    UUID of the GPU that it lies on, for engines there; empty where ``sender`` sends it (NCCL): the actor that holds it,
    and nothing that ``types`` know of. The buffer is written again once s + 1 newer versions have been published: its
    last 8 bytes, from ``size`` on, are ``serial`` as long as it holds this version.
    """

    version: int
    serial: int
    metas: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    size: int
    sample: tuple[Any, ...] = ()
    handles: Mapping[str, bytes] = field(default_factory=dict)
    sender: Any = None


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """What the rollout side is told to make: prompts ``rows`` (one per group, group order) of partition k,
    by policy version ``version``.

    Under dynamic sampling there are no ``rows``: they are those from position ``start`` of the sequence of epochs on;
    None is where the candidates of the plan before ended, which the rollout side knows first.
    """

    partition: int
    version: int
    epochs: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    start: int | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Greedy answers on a split, by policy version ``version``: ``correct`` of ``total`` prompts have a reward of
    exactly 1, and ``reward_mean`` is the mean over those with a valid reward (NaN: none has, or it is not on record).
    """

    split: str
    version: int
    correct: int
    total: int
    reward_mean: float = float("nan")
    examples: tuple[tuple[str, str, float], ...] = field(default=())

    @property
    def exact_match(self) -> float:
        return self.correct / self.total if self.total else float("nan")


class StrettoError(Exception):
    """An error that ends a run with one clear message; the CLI prints it without a traceback."""


class WeightsLost(StrettoError):
    """The weights of a version that is still to be used are gone, for every engine."""


class CollectiveError(StrettoError):
    """An actor rank could not finish an operation with its siblings. Mostly a consequence: the cause is what happened
    to the sibling, and is reported in its place where it is known.
    """


class ConfigError(StrettoError):
    """Everything wrong with a configuration, all at once.

    ``exit_code`` of the command: 2 where the recipe itself is wrong, 1 where it does not fit what it meets.
    """

    def __init__(self, problems: Sequence[str], exit_code: int = 2):
        self.problems = list(problems)
        self.exit_code = exit_code
        super().__init__("\n".join(self.problems))
