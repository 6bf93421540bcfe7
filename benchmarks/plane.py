"""What the data plane costs: time of puts, claims and fetches over an embedded Ray, for three sizes of groups.

    python benchmarks/plane.py [--partitions 5]

Prints one line per size; times are medians over partitions, the first of which is left out as warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
import ray

from stretto.plane.protocol import mib
from stretto.plane.ray_plane import PayloadProducer, RayPlane, RayProducer
from stretto.types import GroupFields, GroupRecord

SIZES = {  # name: groups, samples per group, prompt tokens, response tokens, patches (square image)
    "demo (digits)": (64, 8, 20, 6, 8),
    "448 px, 1k tokens": (32, 8, 400, 1000, 784),
    "2,048 px": (8, 8, 4400, 1000, 16384),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=5, help="partitions of each size that are measured")
    count = parser.parse_args().partitions
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=4 * 2**30,
        log_to_driver=False,
        configure_logging=False,
    )
    plane = RayPlane.start(capacity_bytes=2 * 2**30, lease_s=600)
    rollout = ray.remote(num_cpus=0)(Rollout).remote(plane)
    plane.attach(rollout, "rollout")
    partition = 0
    for name, (groups, n, *shape) in SIZES.items():
        puts, claims, fetches = [], [], []
        for _ in range(count + 1):
            partition += 1
            plane.open(partition, groups, n)
            puts.append(ray.get(rollout.put.remote(partition, groups, n, *shape)))
            begun = time.perf_counter()
            lease = plane.claim(partition, "actor", groups, timeout_s=60)
            claims.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            fields = plane.fetch(lease)
            fetches.append(time.perf_counter() - begun)
            held = plane.stats().held_bytes
            del fields
            plane.ack(lease)
            plane.close(partition)
            del lease
        put, claim, fetch = (statistics.median(times[1:]) for times in (puts, claims, fetches))
        print(
            f"{name:18} {groups:3d} groups of {mib(held // groups):>12}: put {1e3 * put / groups:6.2f} ms/group "
            f"({held / put / 2**30:4.2f} GiB/s), claim {1e3 * claim:4.1f} ms, "
            f"fetch {1e3 * fetch / groups:4.2f} ms/group"
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
