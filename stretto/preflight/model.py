"""The model: its folder, its tokenizer and processor, its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stretto.machine_checks import model_folder, teacher_folder
from stretto.preflight.case import Case, Caution, Fact, Line, problems_of, size
from stretto.types import ConfigError

if TYPE_CHECKING:
    from stretto.models.qwen3_vl import Qwen3VL


def model(case: Case) -> Iterator[Line]:
    missing = list(model_folder(case.config, case.reader))
    yield from missing
    if missing:
        return
    from stretto.models.loading import load_family, without_weights
    from stretto.models.lora import check

    try:
        case.family = load_family(case.config.model)
    except ConfigError as error:
        yield from problems_of(error, case.model_name)
        return
    if case.training and case.config.lora.rank > 0:
        try:
            check(without_weights(case.config.model), case.config.lora)
        except ConfigError as error:
            yield from problems_of(error, "lora.targets")
    if case.config.algorithm.teacher and case.training:
        yield from _teacher(case, case.family)
    if case.thorough:
        if not case.config.model.path:
            yield Caution(
                "model.path is unset: training starts from random weights, and GRPO learns nothing from a model that "
                "is never right; make one with `stretto sft RECIPE MODEL` first, and set model.path to it"
            )
        parameters, version = sizes(case)
        where = case.config.model.path or "random weights by model.config"
        yield Fact(
            f"{where}: {parameters:,} parameters, {size(version)} a version in {case.config.model.dtype}; "
            f"{len(case.family.tokenizer):,} ids"
        )


def _teacher(case: Case, student: Qwen3VL) -> Iterator[Line]:
    from stretto.models.loading import weight_bytes
    from stretto.models.teacher import load_teacher_family, teacher_config

    missing = list(teacher_folder(case.config, case.reader))
    yield from missing
    if missing:
        return
    teacher = case.config.algorithm.teacher
    try:
        load_teacher_family(case.config, student)
    except ConfigError as error:
        yield from problems_of(error, "algorithm.teacher")
        return
    case.teacher_bytes = weight_bytes(teacher_config(case.config))
    yield Fact(f"teacher {teacher}: reads the same tokens and pixels; {size(case.teacher_bytes)}")
    if teacher == case.config.model.path:
        yield Caution(
            "the teacher is the model that training starts from, so that it only holds the policy back; name a better "
            "one, or use algorithm.kl_loss_coef for that"
        )


def sizes(case: Case) -> tuple[int, int]:
    """Parameters of the model, and bytes of one published version."""
    from stretto.models.loading import DTYPES, weight_bytes
    from stretto.models.lora import published_bytes

    whole = weight_bytes(case.config.model)
    return whole // DTYPES[case.config.model.dtype].itemsize, published_bytes(case.config)


def trained(case: Case) -> int:
    """Parameters that training changes."""
    from stretto.models.parts import trained_parameters

    assert case.family is not None
    return trained_parameters(case.config, case.family)
