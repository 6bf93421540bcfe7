"""S: phase 1 forwards each chunk as soon as its groups are there, in place of waiting for the whole mini."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stretto.config import Config
from stretto.switches.base import R_WITH_S, Event, Evidence, Exact, Facts, Numerics, named

HAND_OVER_NS = 100_000_000
"""From a claim to its first forward pass schedule, call and fetch; what comes within it leaves nothing to overlap."""


class ChunkOverlap:
    name = "chunk_overlap"
    letter = "S"
    env = "HYBRID_PIPELINE_FORWARD"
    touches: tuple[str, ...] = ("loop.claim",)

    def on(self, config: Config) -> bool:
        return config.switches.chunk_overlap

    def numerics(self, config: Config, facts: Facts | None = None) -> Numerics:
        return Exact()

    def guards(self, config: Config) -> list[str]:
        actor, algorithm = config.actor, config.algorithm
        found = []
        if config.switches.logprob_reuse:
            found.append(R_WITH_S)
        groups, chunks = config.rollout.prompts_per_partition, actor.chunks_per_mini
        if groups % chunks:
            found.append(
                f"rollout.prompts_per_partition = {groups}, actor.chunks_per_mini = {chunks}: a chunk holds whole "
                "prompt groups, equally many each; choose a divisor"
            )
        if chunks == 1:
            found.append(
                "actor.chunks_per_mini = 1: the whole mini is one chunk, so that nothing could be forwarded before it "
                "is complete; set it to at least 2"
            )
        if actor.minis_per_partition != 1:
            found.append(
                f"actor.minis_per_partition = {actor.minis_per_partition}: chunks are claimed of exactly one mini a "
                "partition; set it to 1"
            )
        if config.rollout.refill_rounds > 0:
            found.append(
                f"rollout.refill_rounds = {config.rollout.refill_rounds}: which groups a chunk holds is known only "
                "once the whole batch is; set it to 0"
            )
        if algorithm.old_policy == "rollout":
            found.append(
                'algorithm.old_policy = "rollout": phase 1 has no old-policy forward to overlap; set it to "actor"'
            )
        return found

    def apply(self, config: Config) -> Config:
        return config.with_seams(phase1="chunks")

    def engaged(self, events: Sequence[Event]) -> Evidence:
        """Every partition was claimed chunk by chunk; and of those whose last group was put when a forward of their
        first chunk could long have begun, one at least was forwarded meanwhile.
        """
        claims = defaultdict(list)
        for span in named(events, "loop.claim"):
            claims[span["partition"]].append(span)
        puts: dict[int, float] = defaultdict(float)
        for span in named(events, "plane.put"):
            k = span["partition"]
            puts[k] = max(puts[k], _end(span))
        forwards: dict[int, float] = {}
        for span in named(events, "actor.forward"):
            k = span.get("partition")
            if k is not None and span.get("role") == "old":
                forwards[k] = min(forwards.get(k, float("inf")), span["start_ns"])
        whole = [k for k, spans in claims.items() if len(spans) < 2 and spans[0].get("chunks", 1) > 1]
        chances = [k for k, spans in claims.items() if puts.get(k, 0.0) > min(map(_end, spans)) + HAND_OVER_NS]
        overlapped = [k for k in chances if forwards.get(k, float("inf")) < puts[k]]
        facts = (
            f"{len(claims) - len(whole)} of {len(claims)} partitions claimed chunk by chunk",
            f"{len(overlapped)} of {len(chances)} partitions that were still being generated were forwarded meanwhile",
        )
        chunked = bool(claims) and not whole
        # A claim of a whole partition ends after its last put: it leaves no chance, and fails all the same.
        return Evidence(chunked and (not chances or bool(overlapped)), facts, bool(chances) or not chunked)


def _end(span: Event) -> float:
    end: float = span["end_ns"]
    return end
