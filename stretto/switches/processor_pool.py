"""P: image processing in a pool of processes, in place of one thread of the rollout process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stretto.config import Config
from stretto.switches.base import Event, Evidence, Exact, Facts, Numerics, named


class ProcessorPool:
    name = "processor_pool"
    letter = "P"
    env = "MM_PROCESSOR_POOL_SIZE"
    touches: tuple[str, ...] = ("processor.process",)

    def on(self, config: Config) -> bool:
        return config.switches.processor_pool > 0

    def numerics(self, config: Config, facts: Facts | None = None) -> Numerics:
        return Exact()

    def guards(self, config: Config) -> list[str]:
        return []

    def apply(self, config: Config) -> Config:
        return config.with_seams(processor_workers=config.switches.processor_pool)

    def engaged(self, events: Sequence[Event]) -> Evidence:
        """Every prompt was processed by a worker process."""
        spans = named(events, "processor.process")
        jobs = Counter(span.get("worker") for span in spans)
        inline = jobs.pop(None, 0)
        facts = [f"worker {pid}: {count} prompts" for pid, count in sorted(jobs.items())]
        if inline:
            facts.append(f"no worker: {inline} prompts")
        return Evidence(bool(jobs) and not inline, tuple(facts) or ("no prompt was processed",))
