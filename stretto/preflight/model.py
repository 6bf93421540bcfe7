"""The model: its folder, its tokenizer and processor, its size."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.machine_checks import model_folder
from stretto.preflight.case import Case, Caution, Fact, Line, problems_of, size
from stretto.types import ConfigError


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
        from stretto.models.teacher import load_teacher_family

        try:
            load_teacher_family(case.config, case.family)
        except ConfigError as error:
            yield from problems_of(error, "algorithm.teacher")
        else:
            yield Fact(f"teacher {case.config.algorithm.teacher}: reads the same tokens and pixels")
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


def sizes(case: Case) -> tuple[int, int]:
    """Parameters of the model, and bytes of one published version."""
    from stretto.models.loading import DTYPES, weight_bytes
    from stretto.models.lora import published_bytes

    whole = weight_bytes(case.config.model)
    return whole // DTYPES[case.config.model.dtype].itemsize, published_bytes(case.config)
