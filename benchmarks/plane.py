"""What the data plane costs: puts, claims and fetches over an embedded Ray, for three sizes of groups.

    python benchmarks/plane.py [--partitions 10] [--out results/plane-cpu]

Every size is measured in two ways, partition by partition in turn: ``owner/ref``, as the engine does it, where a group
has its image and prompt once; and ``copies``, the same samples as groups of one, each with a copy of its own, as a
plane without group payloads would have them. Figures are medians (least-greatest) over partitions, the first of which
is left out. Latency of a group: from its put alone, the plane being idle, until it is readable.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from harness import setting, spread

from stretto.compat import ray_on_loopback
from stretto.plane.protocol import mib
from stretto.plane.ray_plane import PayloadProducer, RayPlane, RayProducer
from stretto.types import GroupFields, GroupRecord

SIZES = {  # name: groups, samples per group, prompt tokens, response tokens, patches (square image)
    "demo (digits)": (64, 8, 20, 6, 8),
    "448 px, 1k tokens": (32, 8, 400, 1000, 784),
    "2,048 px": (2, 8, 4400, 1000, 16384),
}


def make_group(
    partition: int, group: int, n: int, prompt: int, response: int, patches: int
) -> tuple[GroupRecord, GroupFields]:
    record = GroupRecord(
        partition=partition,
        group=group,
        row_id=str(group),
        prompt_tokens=prompt,
        patches=patches,
        images=1,
        response_tokens=(response,) * n,
        rewards=(0.0,) * n,
        valid=(True,) * n,
        truncated=(False,) * n,
        version_start=(0,) * n,
        version_end=(0,) * n,
    )
    return record, {
        "prompt_ids": np.zeros(prompt, np.int32),
        "mm_token_type_ids": np.zeros(prompt, np.int8),
        "pixel_values": np.ones((patches, 1536), np.float32),
        "image_grid_thw": np.array([[1, 1, patches]], np.int32),
        "response_ids": [np.zeros(response, np.int32)] * n,
        "rollout_logprobs": [np.zeros(response, np.float32)] * n,
    }


class Rollout(PayloadProducer):
    def __init__(self, plane: RayPlane):
        self.producer = RayProducer(plane, "rollout", self)

    async def put(self, partition: int, groups: int, *shape: int) -> float:
        """Seconds until all groups of a partition are readable."""
        made = [make_group(partition, group, *shape) for group in range(groups)]
        begun = time.perf_counter()
        await asyncio.gather(*(self.producer.put(record, fields) for record, fields in made))
        return time.perf_counter() - begun

    async def put_alone(self, partition: int, groups: int, *shape: int) -> list[float]:
        """Seconds of each group's put, one after another."""
        times = []
        for group in range(groups):
            record, fields = make_group(partition, group, *shape)
            begun = time.perf_counter()
            await self.producer.put(record, fields)
            times.append(time.perf_counter() - begun)
        return times


def measure(
    plane: RayPlane, rollout: Any, partition: int, groups: int, n: int, shape: Sequence[int]
) -> dict[str, float]:
    """One partition put, claimed and fetched; seconds and bytes."""
    plane.open(partition, groups, n)
    put = ray.get(rollout.put.remote(partition, groups, n, *shape))
    begun = time.perf_counter()
    lease = plane.claim(partition, "actor", groups, timeout_s=60)
    claim = time.perf_counter() - begun
    begun = time.perf_counter()
    fields = plane.fetch(lease)
    fetch = time.perf_counter() - begun
    copied = any(f["pixel_values"].flags.writeable for f in fields.values())  # what lies in the object store is not
    held = plane.stats().held_bytes
    del fields
    plane.ack(lease)
    plane.close(partition)
    return {"put": put, "claim": claim, "fetch": fetch, "held": held, "copied": float(copied)}


def latency(plane: RayPlane, rollout: Any, partition: int, groups: int, n: int, shape: Sequence[int]) -> list[float]:
    plane.open(partition, groups, n)
    times = ray.get(rollout.put_alone.remote(partition, groups, n, *shape))
    plane.close(partition, discard=True)
    return times


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| size | payloads | bytes | put, GiB/s | put, ms | claim, ms | fetch, ms | latency of a group, ms |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, ways in found.items():
        for way, cells in ways.items():
            rates = [c["held"] / c["put"] / 2**30 for c in cells["partitions"]]
            times = [spread([1e3 * c[key] for c in cells["partitions"]], 1) for key in ("put", "claim", "fetch")]
            alone = spread([1e3 * t for t in cells["latency"]], 2)
            held = mib(cells["partitions"][0]["held"])
            lines.append(f"| {name} | {way} | {held} | {spread(rates, 2)} | {' | '.join(times)} | {alone} |")
    copied = any(c["copied"] for ways in found.values() for cells in ways.values() for c in cells["partitions"])
    return "\n".join(
        [*lines, "", f"Fetched arrays are {'copies' if copied else 'views of shared memory, not copies'}."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=10, help="partitions of each size that are measured")
    parser.add_argument("--out", type=Path, help="write the figures to OUT.json and the table to OUT.md")
    args = parser.parse_args()
    with ray_on_loopback():
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=6 * 2**30,
            log_to_driver=False,
            configure_logging=False,
        )
    plane = RayPlane.start(capacity_bytes=4 * 2**30, lease_s=600)
    rollout = ray.remote(num_cpus=0)(Rollout).remote(plane)
    plane.attach(rollout, "rollout")
    numbers = itertools.count()
    found: dict[str, dict[str, Any]] = {}
    for name, (groups, n, *shape) in SIZES.items():
        ways = {"owner/ref": (groups, n), "copies": (groups * n, 1)}
        found[name] = {way: {"partitions": [], "latency": []} for way in ways}
        for repetition in range(args.partitions + 1):
            for way, (count, samples) in ways.items():
                cell = measure(plane, rollout, next(numbers), count, samples, shape)
                if repetition:
                    found[name][way]["partitions"].append(cell)
        for way, (count, samples) in ways.items():
            found[name][way]["latency"] = latency(plane, rollout, next(numbers), min(count, 16), samples, shape)[1:]
    ray.shutdown()
    text = table(found)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"arguments": {"partitions": args.partitions}, "setting": setting(), "sizes": SIZES, "cells": found}
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=1, default=str) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
