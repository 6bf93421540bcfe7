"""Which options of the algorithm exclude one another, and which would not be read. Importing this module loads no
torch, ray or transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.config import Config
from stretto.problems import Problem, Reader


def algorithm_problems(config: Config, reader: Reader) -> Iterator[Problem]:
    """Every combination that is refused; whatever is not named here is trained (``test_combination_runs``)."""
    yield from _unread(config, reader)
    yield from _advantages(config, reader)
    yield from _old_policy(config, reader)
    yield from _correction(config, reader)
    yield from _updates(config, reader)
    yield from _parts(config, reader)


def _unread(config: Config, reader: Reader) -> Iterator[Problem]:
    """Options that were set and that nothing would read: who set them expects something of them."""
    algorithm, actor, lora = config.algorithm, config.actor, config.lora
    divides = algorithm.advantage in ("grpo", "reinforce_pp_baseline")
    snapshots = algorithm.old_policy == "old_actor"
    kl = algorithm.kl_loss_coef > 0 or algorithm.kl_reward_coef > 0
    decays = actor.decay_fraction > 0
    rules: list[tuple[str, str, bool, str]] = [
        ("algorithm.advantage_eps", "algorithm.advantage", divides, "nothing is divided by a standard deviation there"),
        ("algorithm.old_actor_every", "algorithm.old_policy", snapshots, "no snapshot is made"),
        ("algorithm.tis_cap", "algorithm.importance_correction", config.importance_correction == "tis", "TIS is off"),
        ("algorithm.mis_low", "algorithm.importance_correction", config.importance_correction == "mis", "MIS is off"),
        ("algorithm.mis_high", "algorithm.importance_correction", config.importance_correction == "mis", "MIS is off"),
        (
            "algorithm.importance_level",
            "algorithm.importance_correction",
            config.importance_correction != "none",
            "there are no importance weights",
        ),
        ("algorithm.kl_estimator", "algorithm.kl_loss_coef", kl, "no KL is computed"),
        ("algorithm.teacher_coef", "algorithm.teacher", bool(algorithm.teacher), "there is no teacher"),
        ("actor.decay_shape", "actor.decay_fraction", decays, "the learning rate does not decay"),
        ("actor.decay_to", "actor.decay_fraction", decays, "the learning rate does not decay"),
        *((f"lora.{key}", "lora.rank", lora.rank > 0, "there are no adapters") for key in _LORA),
    ]  # fmt: skip
    for name, decided_by, read, why in rules:
        if not read and reader.differs(name):
            yield reader.problem(name, decided_by, why=f"{why}, so that {name} has no effect; leave it out")


_LORA = ("alpha", "dropout", "targets", "publish")


def _advantages(config: Config, reader: Reader) -> Iterator[Problem]:
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.advantage == "none" and not algorithm.teacher:
        yield reader.problem(
            "algorithm.advantage",
            "algorithm.teacher",
            why='there is nothing to learn from; name a teacher, or set advantage to "grpo"',
        )
    if algorithm.advantage == "none" and algorithm.kl_reward_coef > 0:
        yield reader.problem(
            "algorithm.kl_reward_coef",
            "algorithm.advantage",
            why="rewards are not looked at, so that a KL in them has no effect; use kl_loss_coef",
        )
    if algorithm.advantage != "none" and rollout.n_samples_per_prompt == 1:
        beside = ', or advantage to "none" to learn from the teacher alone' if algorithm.teacher else ""
        yield reader.problem(
            "rollout.n_samples_per_prompt",
            "algorithm.advantage",
            why="an advantage is the difference to the other samples of the group, and there are none: every one would "
            f"be 0; set n_samples_per_prompt to at least 2{beside}",
        )
    if rollout.refill_rounds > 0 and algorithm.advantage == "none":
        yield reader.problem(
            "rollout.refill_rounds",
            "algorithm.advantage",
            why="a teacher has something to say of groups with equal rewards, too; set refill_rounds to 0",
        )


def _old_policy(config: Config, reader: Reader) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.kl_reward_coef > 0 and algorithm.old_policy != "actor":
        yield reader.problem(
            "algorithm.kl_reward_coef",
            "algorithm.old_policy",
            why="the KL of a reward needs the actor's own log-probs before the update, which are not computed; set "
            'old_policy to "actor", or use kl_loss_coef',
        )
    if config.actor.before_logprob_hook and algorithm.old_policy == "rollout" and not needs_forward(config):
        yield reader.problem(
            "actor.before_logprob_hook",
            "algorithm.old_policy",
            why="phase 1 computes no log-probs, so that the hook would never be called; leave it out",
        )


def needs_forward(config: Config) -> bool:
    """Whether phase 1 forwards anything at all."""
    algorithm = config.algorithm
    reference = algorithm.kl_loss_coef > 0 or algorithm.kl_reward_coef > 0
    return algorithm.old_policy != "rollout" or reference or bool(algorithm.teacher)


def _correction(config: Config, reader: Reader) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.old_policy == "rollout" and config.importance_correction != "none":
        yield reader.problem(
            "algorithm.importance_correction",
            "algorithm.old_policy",
            why="the ratio starts from the rollout's log-probs, so that every importance weight would be 1; set "
            'importance_correction to "auto" or "none"',
        )
    if config.snapshot_lags and config.importance_correction == "none":
        yield reader.problem(
            "algorithm.importance_correction",
            "algorithm.old_policy",
            "algorithm.old_actor_every",
            why="the snapshot is older than the policy that samples, and nothing would correct for that; set "
            'importance_correction to "auto", "tis" or "mis", or old_policy to "actor"',
        )
    if config.importance_correction == "tis" and algorithm.tis_cap < 1:
        yield reader.problem(
            "algorithm.tis_cap",
            why="a token that rollout and actor agree on has weight 1 and would be cut; set it to at least 1",
        )
    if config.importance_correction == "mis" and not algorithm.mis_low <= 1 <= algorithm.mis_high:
        yield reader.problem(
            "algorithm.mis_low",
            "algorithm.mis_high",
            why="a token that rollout and actor agree on has weight 1 and would be dropped; let 1 lie between them",
        )


def _updates(config: Config, reader: Reader) -> Iterator[Problem]:
    per = config.updates_per_partition
    if config.run.updates % per:
        below = config.run.updates // per * per
        yield reader.problem(
            "run.updates",
            "actor.minis_per_partition",
            "actor.epochs",
            why=f"every rollout batch takes {per} updates; set run.updates to "
            + (f"{below} or {below + per}" if below else f"{per}"),
        )


def _parts(config: Config, reader: Reader) -> Iterator[Problem]:
    freeze, lora = config.actor.freeze, config.lora
    if len(set(freeze)) < len(freeze):
        yield reader.problem("actor.freeze", why="a part is named twice; name it once")
    if lora.rank > 0 and not lora.targets:
        yield reader.problem("lora.targets", "lora.rank", why="no layer would get an adapter; name some")
    if len(set(lora.targets)) < len(lora.targets) or "" in lora.targets:
        yield reader.problem("lora.targets", why="expected names of linear layers, each once")
    if lora.rank > 0 and freeze:
        yield reader.problem(
            "actor.freeze",
            "lora.rank",
            why="with adapters everything else is frozen already; leave freeze out, and name no layers of those parts "
            "in lora.targets",
        )
