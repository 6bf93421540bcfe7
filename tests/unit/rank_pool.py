"""Real processes that form a torch.distributed group through the product's own rendezvous, started once for many
tests.

Four processes serve worlds of 1, 2 and 4: the first ones form a group of their own for each. With a GPU each, two serve
worlds of 1 and 2. Functions to be run are named by module and name, take this rank's ``RankGroup`` first, and answer
with what pickles (numpy, not torch).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

HASTY_S = 2.0
"""Time-out of the group ``hasty`` of two."""
LIMIT_S = 100.0


class RankPool:
    """``call`` runs a function on the first ``world`` processes at once."""

    def __init__(self, size: int = 4, device: str = "cpu") -> None:
        # A forkserver imports torch and transformers once, not four times; a GPU wants processes that forked nothing.
        context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            context.set_forkserver_preload(["stretto.actor.rank", "transformers.models.qwen3_vl.modeling_qwen3_vl"])
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, device, theirs, sys.path), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        address = self._answer(0)
        for pipe in self._pipes:
            pipe.send(address)
        for rank in range(size):
            self._answer(rank)

    def call(self, world: int | str, function: str, *args: Any) -> list[Any]:
        """Results in rank order. ``world``: 1, 2, 4, or ``hasty``. Raises RuntimeError with a rank's traceback."""
        ranks = range(2 if world == "hasty" else int(world))
        for rank in ranks:
            self._pipes[rank].send((world, function, args))
        return [self._answer(rank) for rank in ranks]

    def _answer(self, rank: int) -> Any:
        if not self._pipes[rank].poll(LIMIT_S):
            raise TimeoutError(f"rank {rank} has not answered for {LIMIT_S} s")
        ok, value = self._pipes[rank].recv()
        if not ok:
            raise RuntimeError(f"rank {rank}: {value}")
        return value

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()


def _serve(rank: int, size: int, device: Any, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    if device == "cuda":  # as Ray does, before CUDA looks
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    import torch
    import torch.distributed as dist

    from stretto import machine
    from stretto.actor.parallel import RankGroup
    from stretto.actor.rendezvous import LOOPBACK, join, leave, listen

    torch.set_num_threads(1)
    if device == "cuda":
        machine.settle((), "exact")
        importlib.import_module("ranks_case").device = device
    listener = listen(LOOPBACK) if rank == 0 else None
    if listener is not None:
        pipe.send((True, listener.getsockname()[1]))
    port = pipe.recv()
    join(RankGroup(rank, size), LOOPBACK, port, own_address=LOOPBACK, device=device, exact=True, listener=listener)
    groups: dict[int | str, RankGroup] = {1: RankGroup(), size: RankGroup(rank, size)}
    if device == "cpu":
        groups[2] = RankGroup(rank, 2, dist.new_group([0, 1]))
        groups["hasty"] = RankGroup(rank, 2, dist.new_group([0, 1], timeout=timedelta(seconds=HASTY_S)))
    pipe.send((True, None))
    while True:
        try:
            world, function, args = pipe.recv()
        except EOFError:
            break
        try:
            module, _, name = function.partition(":")
            pipe.send((True, getattr(importlib.import_module(module), name)(groups[world], *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    leave()
