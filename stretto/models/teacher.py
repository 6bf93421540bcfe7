"""Whether another model may teach this one: it has to read the same tokens and the same pixels."""

from __future__ import annotations

from stretto.config import Config, ModelConfig
from stretto.models.loading import load_family
from stretto.models.qwen3_vl import Qwen3VL
from stretto.types import ConfigError


def teacher_config(config: Config) -> ModelConfig:
    """The options that the teacher is loaded by: those of the student, but for the path."""
    return config.model.model_copy(update={"path": config.algorithm.teacher, "config": None})


def load_teacher_family(config: Config, student: Qwen3VL) -> Qwen3VL:
    """The teacher's tokenizer, processor and config.

    Raises:
        ConfigError: it cannot be loaded, or does not read what the student reads; lists every difference.
    """
    where = f"algorithm.teacher = {config.algorithm.teacher!r}"
    try:
        teacher = load_family(teacher_config(config))
    except ConfigError as error:
        raise ConfigError([f"{where}: {text}" for text in error.problems]) from error
    problems = [f"{where}: {why}" for why in _differences(student, teacher)]
    if problems:
        raise ConfigError(problems)
    return teacher


def _differences(student: Qwen3VL, teacher: Qwen3VL) -> list[str]:
    ours, theirs = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    found = []
    if ours != theirs:
        odd = next(token for token in sorted(ours.keys() | theirs.keys()) if ours.get(token) != theirs.get(token))
        found.append(
            f"its tokenizer is another one ({odd!r} is id {theirs.get(odd)} there and {ours.get(odd)} here); a teacher "
            "judges the student's own tokens, so choose one of the same family"
        )
    if set(student.eos_ids) != set(teacher.eos_ids):
        found.append(
            f"responses end with ids {sorted(teacher.eos_ids)} there and {sorted(student.eos_ids)} here; give both "
            "models the same eos_token_id in generation_config.json"
        )
    for name in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"):
        here, there = getattr(student.image_processor, name), getattr(teacher.image_processor, name)
        if here != there:
            found.append(
                f"its image processor has {name} {there}, the student's {here}; images are processed once, for both, "
                "so choose a teacher of the same family"
            )
    return found
