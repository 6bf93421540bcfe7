"""Options of the algorithm, each with the values that a pairwise-covering set of runs gives it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from stretto.checks import cross_field_problems
from stretto.config import Config

Settings = dict[str, Any]
"""Values by dotted option name."""

TEACHER = "the teacher's folder"
VALUES: dict[str, list[Settings]] = {
    "advantage": [
        {"algorithm.advantage": name} for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "none")
    ],
    "policy loss": [{"algorithm.policy_loss": name} for name in ("ppo_clip", "gspo", "cispo")],
    "aggregation": [{"algorithm.aggregation": name} for name in ("token_mean", "sequence_mean", "constant_length")],
    "truncated": [{"algorithm.truncated": name} for name in ("train", "mask", "drop")],
    "old policy": [
        {},
        {"algorithm.old_policy": "old_actor", "algorithm.old_actor_every": 2},
        {"algorithm.old_policy": "rollout"},
    ],
    "correction": [
        {"algorithm.importance_correction": "none"},
        {"algorithm.importance_correction": "tis"},
        {"algorithm.importance_correction": "tis", "algorithm.importance_level": "sequence"},
        {"algorithm.importance_correction": "mis"},
        {"algorithm.importance_correction": "mis", "algorithm.importance_level": "sequence"},
    ],
    "KL": [
        {},
        {"algorithm.kl_loss_coef": 0.1},
        {"algorithm.kl_loss_coef": 0.1, "algorithm.kl_estimator": "k2"},
        {"algorithm.kl_reward_coef": 0.1},
        {"algorithm.kl_reward_coef": 0.1, "algorithm.kl_loss_coef": 0.1, "algorithm.kl_estimator": "k1"},
    ],
    "teacher": [{}, {"algorithm.teacher": TEACHER, "algorithm.teacher_coef": 0.5}],
    "updates": [{}, {"actor.minis_per_partition": 2}, {"actor.epochs": 2}],
    "trained": [
        {},
        {"actor.freeze": ["vision_tower"]},
        {"actor.freeze": ["projector", "vision_tower"]},
        {"lora.rank": 4},
        {"lora.rank": 4, "lora.publish": "adapter", "lora.dropout": 0.1},
    ],
    "decay": [{}, {"actor.decay_shape": "cosine", "actor.weight_decay": 0.1}],
    "checkpointing": [{}, {"actor.gradient_checkpointing": True}],
    "refill": [{}, {"rollout.refill_rounds": 20}],
    "staleness": [{"staleness.max": 0}, {"staleness.max": 1}],
    "ranks": [{}, {"actor.data_parallel": 2}],
}
BASE: dict[str, Settings] = {
    "run": {"updates": 4},
    "model": {"path": "a model"},
    "rollout": {"prompts_per_partition": 4, "n_samples_per_prompt": 4, "groups_per_decode_batch": 2},
    "actor": {"chunks_per_mini": 2},
}


def tables(settings: Sequence[Settings]) -> dict[str, Settings]:
    """The tables of a recipe: ``BASE``, and what the settings say."""
    made = {block: dict(values) for block, values in BASE.items()}
    for one in settings:
        for name, value in one.items():
            block, key = name.split(".")
            made.setdefault(block, {})[key] = tuple(value) if isinstance(value, list) else value
    return made


def refusals(settings: Sequence[Settings]) -> list[str]:
    """Why options alone forbid a combination."""
    return [problem.text for problem in cross_field_problems(Config.model_validate(tables(settings)), {})]


def pairwise(tries: int = 60) -> list[list[Settings]]:
    """Rows that are not refused; together they hold every pair of values of two options that any of ``tries`` random
    completions can have. Libraries for this judge a row by its beginning, where a later value may be what allows it.
    """
    rng = random.Random(0)
    names = list(VALUES)
    missing = {_key(pair) for pair in pairs()}
    rows: list[list[Settings]] = []
    for one, a, other, b in pairs():
        if _key((one, a, other, b)) not in missing:
            continue
        made = []
        for _ in range(tries):
            row = {name: rng.choice(values) for name, values in VALUES.items()} | {one: a, other: b}
            if not refusals(list(row.values())):
                made.append([row[name] for name in names])
        if made:
            best = max(made, key=lambda row: len(missing & covered(row)))
            missing -= covered(best)
            rows.append(best)
    return rows


def covered(row: Sequence[Settings]) -> set[str]:
    """The pairs that a row holds."""
    named = list(zip(VALUES, row, strict=True))
    return {_key((*one, *other)) for one, other in itertools.combinations(named, 2)}


def _key(pair: tuple[str, Settings, str, Settings]) -> str:
    return repr(pair)


def pairs() -> list[tuple[str, Settings, str, Settings]]:
    """Every pair of values of two options."""
    return [
        (one, a, other, b)
        for one, other in itertools.combinations(VALUES, 2)
        for a in VALUES[one]
        for b in VALUES[other]
    ]
