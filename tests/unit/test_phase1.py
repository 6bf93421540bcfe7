"""Phase 1 against the ledger itself, in one process: what a late chunk does to the leases of those before it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from plane_case import make_group

from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.phase1 import ByChunk, WholePartition
from stretto.plane.ledger import Ledger
from stretto.types import ForwardReport

LEASE_S, LATE_S = 0.5, 0.7
GROUPS, SAMPLES = 4, 3


class Plane:
    """A ledger that is polled where the data plane's would be told; groups 2 and 3 come ``LATE_S`` after the first."""

    def __init__(self) -> None:
        self.ledger = Ledger(capacity_bytes=2**20, lease_s=LEASE_S, clock=time.monotonic)
        self.ledger.open(0, GROUPS, SAMPLES, chunks_per_mini=2)
        self.release, self.ack, self.close = self.ledger.release, self.ledger.ack, self.ledger.close
        self._begun, self._put = time.monotonic(), 0

    def claim(self, partition: int, consumer: str, groups: Any, timeout_s: float, mini: int, chunk: int) -> Any:
        claim = self.ledger.begin_claim(partition, consumer, groups, timeout_s, mini, chunk)
        while (lease := self.ledger.poll_claim(claim)) is None:
            self._produce()
            time.sleep(0.01)
        return lease

    def _produce(self) -> None:
        there = GROUPS if time.monotonic() - self._begun > LATE_S else GROUPS // 2
        for group in range(self._put, there):
            record, _ = make_group(0, group)
            self.ledger.commit_put(self.ledger.begin_put(record, 1, 1), None)
        self._put = there


@pytest.mark.parametrize("kind", [WholePartition, ByChunk])
def test_a_wait_for_later_chunks_that_is_longer_than_a_lease_costs_no_lease(kind: Any) -> None:
    config = Config.model_validate(
        {
            "model": {"path": "org/model"},
            "rollout": {"prompts_per_partition": GROUPS, "n_samples_per_prompt": SAMPLES},
            "actor": {"chunks_per_mini": 2},
            "plane": {"fetch_timeout_s": 10.0, "lease_s": LEASE_S},
            "staleness": {"max": 100, "mode": "bounded"},
            "run": {"determinism": "fast"},
        }
    )
    plane = Plane()

    def forward(chunk: Any, lease: Any) -> Any:
        return lambda: [ForwardReport(0.0, 0.0, 0)]

    batch = kind(config, plane, forward, Tracer(None, "driver"), "cpu")(0)
    assert [record.group for record in batch.records] == list(range(GROUPS))
    plane.ack(*batch.leases)
    plane.close(0)  # all consumed, once
