"""How actor ranks find one another: one listening socket, on one address, and a torch.distributed group over it.

torch's own rendezvous listens on every interface of the machine. Here rank 0 binds the socket itself, and the backends
are told which interface to use.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Literal

import psutil
import torch
import torch.distributed as dist

from stretto.actor.parallel import RankGroup
from stretto.types import StrettoError

JOIN_TIMEOUT = timedelta(minutes=3)
"""How long ranks wait for one another at the start; their models are loaded by then."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits in a collective for the slowest one, which has its own share of microbatches to finish."""
LOOPBACK = "127.0.0.1"
REPEATABLE_NCCL = {
    # Left alone, NCCL may choose another algorithm, hence another order of sums, from one start to the next.
    "NCCL_ALGO": "Ring",
    # Sums inside the switch have an order of their own.
    "NCCL_NVLS_ENABLE": "0",
}


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of ``address`` alone."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen()
    return listener


def join(
    group: RankGroup,
    address: str,
    port: int,
    *,
    own_address: str,
    device: Literal["cpu", "cuda"],
    exact: bool,
    listener: socket.socket | None = None,
    collective_timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> None:
    """Make this process a member of the default group of ``group.world`` ranks, which meet at ``address:port``; it
    listens and connects at ``own_address`` alone.

    Rank 0 hands in its ``listener``. Returns once all ranks are there. Raises CollectiveError where they do not come.
    """
    if group.world == 1:
        return
    interface = interface_of(own_address)
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if exact:
        os.environ |= REPEATABLE_NCCL
    with group.collective("its start"):
        store = dist.TCPStore(
            address,
            port,
            group.world,
            is_master=listener is not None,
            timeout=JOIN_TIMEOUT,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=group.rank,
            world_size=group.world,
            timeout=collective_timeout,
            # Connects at once, so that ranks that cannot reach one another say so here.
            device_id=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None,
        )
        dist.barrier()


def leave() -> None:
    """End this process's membership, where it has one. Siblings that are gone already do no harm."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # the end of a process is no place to complain about a sibling's
            dist.destroy_process_group()


def interface_of(address: str) -> str:
    """The network interface that has ``address``.

    Raises:
        StrettoError: none has.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return str(name)
    raise StrettoError(f"no network interface of this machine has the address {address}, which actor ranks are to use")
