"""R: the training forward supplies the old-policy log-probs, in place of a forward of their own."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.config import Config
from stretto.switches.base import R_WITH_S, Bounded, Event, Evidence, Exact, Facts, Numerics, named

ROUNDING = {"float32": 1e-5, "bfloat16": 0.1}
"""How far log-probs of two orders of the same sums may lie apart: measured were 5e-6 (batches of other shapes, CPU) and
0.06 (compiled layers, H200)."""


class LogprobReuse:
    name = "logprob_reuse"
    letter = "R"
    env = "HYBRID_REUSE_TRAIN_LOGPROBS"
    touches: tuple[str, ...] = ("actor.forward",)

    def on(self, config: Config) -> bool:
        return config.switches.logprob_reuse

    def numerics(self, config: Config, facts: Facts | None = None) -> Numerics:
        """The start-up check of the actor compares a microbatch with and without gradient; a difference there, on any
        rank, makes it Bounded.
        """
        ranks = [] if facts is None else facts.get("ranks", [facts])
        if all(rank["no_grad_is_grad"] for rank in ranks):
            return Exact()
        return Bounded(
            ROUNDING[config.model.dtype],
            "on this device a forward without gradient has other bits than the training forward",
        )

    def guards(self, config: Config) -> list[str]:
        actor, algorithm = config.actor, config.algorithm
        found = []
        if config.switches.chunk_overlap:
            found.append(R_WITH_S)
        if actor.minis_per_partition != 1:
            found.append(
                f"actor.minis_per_partition = {actor.minis_per_partition}: from the second mini on, the training "
                "forward is not the policy before the update; set it to 1"
            )
        if actor.epochs != 1:
            found.append(
                f"actor.epochs = {actor.epochs}: from the second epoch on, the training forward is not the policy "
                "before the update; set it to 1"
            )
        for name, value in dropouts(config).items():
            if value > 0:
                found.append(
                    f"{name} = {value}: with dropout the training forward is not the policy that sampled; set it to 0"
                )
        if algorithm.kl_reward_coef > 0:
            found.append(
                f"algorithm.kl_reward_coef = {algorithm.kl_reward_coef}: the KL of a reward needs old-policy log-probs "
                "before training; set it to 0"
            )
        if algorithm.kl_loss_coef > 0:
            found.append(
                f"algorithm.kl_loss_coef = {algorithm.kl_loss_coef}: a reference forward runs before training all the "
                "same; set it to 0"
            )
        if algorithm.teacher:
            found.append(
                f"algorithm.teacher = {algorithm.teacher!r}: the teacher's advantages need old-policy log-probs before "
                "training; leave it out"
            )
        if algorithm.old_policy != "actor":
            found.append(
                f"algorithm.old_policy = {algorithm.old_policy!r}: the training forward stands in for the actor's own "
                'log-probs, no others; set it to "actor"'
            )
        if actor.before_logprob_hook:
            found.append(
                f"actor.before_logprob_hook = {actor.before_logprob_hook!r}: there is no forward that it could come "
                "before; leave it out"
            )
        stale = config.staleness.max > 0 and not config.seams.replay  # a replay's staleness is that of its recording
        if stale and algorithm.old_policy == "actor" and config.importance_correction == "none":
            found.append(
                f"staleness.max = {config.staleness.max} without importance correction: nothing would correct for the "
                'policy that sampled; set algorithm.importance_correction to "tis" or "mis"'
            )
        return found

    def apply(self, config: Config) -> Config:
        return config.with_seams(old_policy="training_forward")

    def engaged(self, events: Sequence[Event]) -> Evidence:
        """No old-policy forward ran, and every sample that was trained reused the training forward's values."""
        forwards = [span for span in named(events, "actor.forward") if span.get("role") == "old"]
        trained = named(events, "actor.train")
        samples = sum(span["samples"] for span in trained)
        reused = sum(span.get("reused", 0) for span in trained)
        facts = (f"{len(forwards)} old-policy forwards", f"{reused} of {samples} trained samples reused")
        return Evidence(not forwards and samples > 0 and reused == samples, facts)


def dropouts(config: Config) -> dict[str, float]:
    """Every dropout of the training forward that options set, by name."""
    text = (config.model.config or {}).get("text", {})
    return {
        "model.config.text.attention_dropout": float(text.get("attention_dropout", 0.0)),
        "lora.dropout": config.lora.dropout,
    }
