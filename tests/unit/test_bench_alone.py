"""A stage alone, apart from real runs: what training waits for, and what is processed before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from stretto.bench.alone import GenerateFirst, _Ready
from stretto.config import Config


@pytest.mark.parametrize(("bound", "waited_for"), [(0, [0, 1, 2, 3]), (1, [1, 2, 3, None]), (9, [3, None, None, None])])
def test_training_alone_waits_for_every_partition_that_can_be_generated_by_then(bound, waited_for):
    config = Config().model_copy(update={"staleness": Config().staleness.model_copy(update={"max": bound})})
    done: list[str] = []
    plane = SimpleNamespace(
        claim=lambda partition, consumer, groups, timeout_s: f"{consumer} {partition} {groups}",
        release=lambda lease: done.append(f"released {lease}"),
    )
    run = SimpleNamespace(config=config, plane=plane, last=4, phase1=lambda k: done.append(f"phase 1 of {k}"))
    first = GenerateFirst(run)
    for k in range(4):
        first(k)
    groups = config.rollout.prompts_per_partition
    expected = []
    for k, partition in enumerate(waited_for):
        expected += [f"released benchmark {partition} {groups}"] * (partition is not None) + [f"phase 1 of {k}"]
    assert done == expected
    assert list(first.waited_s) == [0, 1, 2, 3]


def test_prompts_that_are_processed_are_not_processed_again():
    asked = []

    async def process(prompt: SimpleNamespace) -> str:
        asked.append(prompt.row_id)
        return "processed late"

    others = SimpleNamespace(process=process, clock="clock")
    ready = _Ready({"a": "processed before"}, others)
    both = [asyncio.run(ready.process(SimpleNamespace(row_id=name))) for name in ("a", "b")]
    assert both == ["processed before", "processed late"] and asked == ["b"] and ready.clock == "clock"
