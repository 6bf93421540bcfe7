"""One rank's part of a checkpoint: what it writes, and how it goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.actor.checkpoint import (
    Checkpointer,
    Entries,
    config_hash,
    iter_shards,
    read_shapes,
    read_shard,
    restore_rng,
    rng_tensors,
)
from stretto.actor.old_policy import ROLES, Role
from stretto.actor.parallel import RankGroup
from stretto.actor.trainer import Trainer
from stretto.actor.weights import WeightTags
from stretto.config import Config
from stretto.types import StrettoError, WeightBucket


class Saving:
    """Masters, optimizer and generators of a rank, and what a run must find unchanged.

    ``others``: role -> fingerprint of the policies that are never trained. ``old_actor``: the tags whose
    snapshot goes into checkpoints, None where there is none.
    """

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        group: RankGroup,
        others: Mapping[Role, str],
        old_actor: WeightTags | None = None,
    ):
        self.config, self.trainer, self.group, self.others, self.old_actor = config, trainer, group, others, old_actor
        self.checkpointer = Checkpointer(Path(config.run.dir) / "checkpoints", config.checkpoint.keep)

    def write_shard(self, step: int) -> Entries:
        """Every rank, after ``checkpointer.begin`` on rank 0: its part of checkpoint ``step``."""
        tensors = {
            "masters": self.trainer.master.named(),
            "optimizer": self.trainer.optimizer_tensors(),
            "rng": rng_tensors(),
        }
        if self.old_actor is not None:
            snapshot = self.old_actor.kept("old_actor")
            tensors["old_actor"] = {name: snapshot[name] for name in self.trainer.master.masters}
        return self.checkpointer.write(step, tensors, self.group.rank, self.group.world)

    def commit(
        self,
        step: int,
        shards: Sequence[Entries],
        cursor: int,
        policy_version: int,
        published: Mapping[int, Callable[[], Iterable[WeightBucket]]],
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Rank 0, once all ranks have written: complete checkpoint ``step``; ``shards`` are their answers.

        ``cursor``: the next partition to train. ``published``: versions v - s … v - 1, each a call that gives its
        buckets. ``extra``: plain JSON of the loop's, found again as ``state["extra"]``.
        """
        trainer = self.trainer
        state = {
            "cursor": cursor,
            "policy_version": policy_version,
            "optimizer_step": trainer.optimizer_step,
            "skipped": trainer.skipped,
            "lr": trainer.lr(trainer.optimizer_step),
            "config_hash": config_hash(self.config),
            "other_policies": dict(self.others),
            "extra": dict(extra or {}),
        }
        return self.checkpointer.commit(step, shards, state, published)

    def load(self, path: Path, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint that ``latest_valid`` found for this number of ranks; every rank reads it.

        Raises StrettoError where its tensors do not fit this model, or another policy is not the one of the run.
        """
        for role, was in state.get("other_policies", {}).items():
            if (now := self.others.get(role)) != was:
                option = "model.path" if role == "ref" else "algorithm.teacher"
                raise StrettoError(
                    f"checkpoint {path}: the {ROLES[role]} policy had the fingerprint {was}, and the model that "
                    f"{option} names now has {now}; put the model back that the run began with, or start a new run in "
                    "another run.dir"
                )
        expected = {name: tuple(t.shape) for name, t in self.trainer.master.named_parameters().items()}
        found = read_shapes(path, "masters")
        if expected != found:
            odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise StrettoError(
                f"checkpoint {path} does not fit the model: {odd[0]!r} is {found.get(odd[0], 'absent')} there and "
                f"{expected.get(odd[0], 'absent')} here; resume with the model options it was saved with, or choose "
                "another run.dir"
            )
        rank = self.group.rank
        self.trainer.restore(
            iter_shards(path, "masters"),
            read_shard(path, "optimizer", rank),
            int(state["optimizer_step"]),
            int(state["skipped"]),
        )
        restore_rng(read_shard(path, "rng", rank))
        if self.old_actor is not None:
            self.old_actor.restore("old_actor", iter_shards(path, "old_actor"))
        self.checkpointer.previous = path
