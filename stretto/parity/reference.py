"""Gradients of a recorded partition in float64, to tell rounding from error: ``python -m stretto.parity.reference``.

The model, the objective and the data are those of the recording, on one rank; what runs compute in float32 is computed
in float64 here, from the same weights. Runs on the CPU, and holds about 40 bytes a parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from stretto import build
from stretto.config import Config
from stretto.models.parts import has_dropout
from stretto.observe.dump import GRADIENTS
from stretto.observe.trace import Tracer
from stretto.phase1 import chunk_ranges
from stretto.recording import Recording
from stretto.schedule import loss_normaliser, schedule_chunk
from stretto.types import GroupFields, GroupRecord, Mini, StrettoError


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, what transformers and the actor compute in float32 whatever the model's type (norms, rotary positions,
    softmax, masters, gradients) is computed in float64: ``torch.float32`` names that type, and ``tensor.float()`` is
    ``tensor.double()``. For a process, or a part of one, that does nothing else meanwhile.
    """
    single, to_single = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = single, to_single  # type: ignore[method-assign]


def gradients(
    config: Config, groups: Sequence[tuple[GroupRecord, GroupFields]], device: str = "cpu"
) -> dict[str, np.ndarray]:
    """Float64 gradients of the last update that a partition takes, by name, as the optimizer gets them: normalised and
    clipped. ``groups``: those of the partition, in order; ``config``: of a run on one rank whose first partition it is.

    Raises:
        StrettoError: the model draws dropout, which another arithmetic draws otherwise; or the update is skipped.
    """
    models = build.actor_models(config, device)
    if any(has_dropout(module) for module in models.modules()):
        raise StrettoError("there is no reference for a model with dropout: every run draws other units; set it to 0")
    for module in models.modules():
        module.double()
    records = [record for record, _ in groups]
    payloads = {record.group: _double(fields) for record, fields in groups}
    with float64_throughout():
        rank = build.actor_rank(config, lambda _, wanted: {g: payloads[g] for g in wanted}, Tracer(None, ""), models)
        minis = _minis(config, records, device)
        for mini, part in minis:
            for chunk in mini.chunks:
                rank.phase1(chunk, [record for record in part if record.group in chunk.groups], None)
        rank.phase2(records)
        longest = config.rollout.max_response_tokens
        for mini, part in minis * config.actor.epochs:
            metrics = rank.phase3(mini, loss_normaliser(part, config.algorithm, longest))
        if metrics["update_skipped"]:
            raise StrettoError("there is no reference for an update that is skipped: it has no gradient")
        return {name: grad.cpu().numpy().copy() for name, grad in rank.trainer.master.named_grads().items()}


def _minis(config: Config, records: Sequence[GroupRecord], device: str) -> list[tuple[Mini, list[GroupRecord]]]:
    """The minis of a partition on one rank, each with its records."""
    actor, minis = config.actor, []
    for index, ranges in enumerate(chunk_ranges(config)):
        chunks = tuple(
            schedule_chunk(
                number,
                [records[group] for group in groups],
                ranks=1,
                max_tokens=actor.max_tokens_per_microbatch,
                max_patches=actor.max_patches_per_microbatch,
                layout=actor.layout_on(device),
            )
            for number, groups in enumerate(ranges)
        )
        mini = Mini(partition=records[0].partition, index=index, chunks=chunks)
        minis.append((mini, [records[group] for groups in ranges for group in groups]))
    return minis


def _double(fields: GroupFields) -> GroupFields:
    return fields | {"pixel_values": np.asarray(fields["pixel_values"], np.float64)}


@dataclass(frozen=True)
class Distance:
    """How far gradients lie from a reference.

    l2           norm of the difference over the norm of the reference, all tensors together
    max          largest difference of an element over the largest element of the reference, of all tensors
    tensor_max   the same within one tensor, for the tensor where that is largest (``tensor``): a tensor of small
                 gradients may be a small difference of large numbers
    """

    l2: float
    max: float
    tensor_max: float
    tensor: str


def distance(found: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> Distance:
    """Of the tensors ``gradients.<name>`` of two dumps; others are left out.

    Raises:
        StrettoError: they have other names or shapes, or a value of either is not finite.
    """
    ours, theirs = ({n: t for n, t in dump.items() if n.startswith(GRADIENTS)} for dump in (found, reference))
    odd = sorted(n for n in ours.keys() | theirs.keys() if _shape(ours.get(n)) != _shape(theirs.get(n)))
    if odd or not theirs:
        raise StrettoError(
            f"these are not gradients of one model: {odd[0]!r} is {_shape(ours.get(odd[0]))} here and "
            f"{_shape(theirs.get(odd[0]))} in the reference"
            if odd
            else "the reference holds no gradients"
        )
    gaps, sizes, squares, whole = {}, {}, 0.0, 0.0
    for name, wanted in theirs.items():
        gap = ours[name].astype(np.float64) - wanted.astype(np.float64)
        if not (np.isfinite(gap).all() and np.isfinite(wanted).all()):
            raise StrettoError(f"{name} holds a value that is not finite")
        gaps[name], sizes[name] = float(np.abs(gap).max(initial=0.0)), float(np.abs(wanted).max(initial=0.0))
        squares += float((gap**2).sum())
        whole += float((wanted.astype(np.float64) ** 2).sum())
    relative = {name: _ratio(gaps[name], sizes[name]) for name in gaps}
    worst = max(relative, key=lambda name: relative[name])
    return Distance(
        l2=_ratio(float(np.sqrt(squares)), float(np.sqrt(whole))),
        max=_ratio(max(gaps.values()), max(sizes.values())),
        tensor_max=relative[worst],
        tensor=worst.removeprefix(GRADIENTS),
    )


def _ratio(gap: float, size: float) -> float:
    return 0.0 if gap == 0 else gap / size if size else float("inf")


def _shape(tensor: np.ndarray | None) -> Any:
    return "absent" if tensor is None else list(tensor.shape)


def main(recording: Path, out: Path) -> None:
    """Write ``gradients.<name>`` of partition 0 of a recording to ``out``."""
    torch.set_num_threads(1)
    recorded = Recording(recording)
    one = recorded.config.model_copy(update={"actor": recorded.config.actor.model_copy(update={"data_parallel": 1})})
    groups = [recorded.group(0, g) for g in range(recorded.groups)]
    found = gradients(one, [(group.record, group.fields) for group in groups])
    save_file({f"{GRADIENTS}{name}": grad for name, grad in found.items()}, out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m stretto.parity.reference RECORDING OUT.safetensors")
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except StrettoError as error:
        sys.exit(f"error: {error}")
