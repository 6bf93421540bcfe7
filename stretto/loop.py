"""The training loop: every stage in order, on one page.

Actor ranks and rollout run concurrently on resources of their own. Asynchrony is a bound, not a second trainer:
partition j is begun once version j - s is published, so while the actor trains partition k, the rollout side may work
on every partition up to k + s, and on none beyond. ``lockstep``: version max(0, j - s) generates partition j, exactly;
``bounded``: each decode batch takes the newest published version.

    driver            rollout (engines: one or more)            actor (ranks: one or more)
    ------            ------------------------------            --------------------------
    start j <= k+s ─► wait for version j-s                                          waits for weights: rollout idle
                      processor ─► engines ─► reward ─► put ┐
    claim chunks ◄─────────── data plane ◄──────────────────┘                       waits for groups: exposed wait
    schedule ────────────────────────────────────────────────► phase 1  fetch, old-policy log-probs
                                                               phase 2  advantages over the full batch
    ack (a lease that expired stops here) ───────────────────► phase 3  train the schedule, one update a mini
    keep s+1 versions ◄──────────────────────────────────────  phase 4  publish version k+1

Back-pressure: the plane holds a bounded number of bytes and makes producers wait; an engine that is busy makes decode
batches wait; rollout waits for version j - s; the actor waits for partition k. Nothing else waits for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.actor.objective import merge_updates
from stretto.schedule.packing import loss_normaliser

if TYPE_CHECKING:
    from stretto.controller import Run


def train(run: Run) -> None:
    """Train partitions ``run.first`` … ``run.last - 1``; the run's cursor is the next partition to train."""
    algorithm, longest = run.config.algorithm, run.config.rollout.max_response_tokens
    bound = run.config.staleness.max
    for j in range(run.first, min(run.first + bound + 1, run.last)):
        run.start_rollout(j)
    for k in range(run.first, run.last):
        with run.step(k) as step:
            with step.timed("phase1"):
                batch = run.phase1(k)
            step.add(batch, run.rollout.report(k))  # refuses here a partition whose rewards failed: before it trains
            with step.timed("phase2"):
                step.merge(run.actor.advantages(batch.records))
            with step.timed("phase3"):
                run.plane.ack(*batch.leases)
                updates = [
                    run.actor.train(mini, loss_normaliser(batch.of(mini), algorithm, longest))
                    for mini in batch.minis * run.config.actor.epochs
                ]
                step.merge(merge_updates(updates))
            with step.timed("publish"):
                run.publish(k + 1, step)
            run.plane.close(k)
            if (j := k + 1 + bound) < run.last:  # the version that it waited for is there: rollout goes on at once
                run.start_rollout(j)
        run.after_step(step)
