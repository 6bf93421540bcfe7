"""What the options of a rollout engine must satisfy together. Importing this module loads no torch, ray or vllm."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.config import Config
from stretto.problems import Problem, Reader
from stretto.wording import shown

READ_BY = {
    "servers": ("http",),
    "tensor_parallel": ("vllm",),
    "engine_args": ("vllm",),
    "weight_transfer": ("vllm",),
}
"""Options of ``rollout`` that only these engines read."""


def engine_problems(config: Config, reader: Reader) -> Iterator[Problem]:
    """Every way in which the options of a rollout engine do not fit it, or one another."""
    yield from _engine(config, reader)
    yield from _weights(config, reader)
    yield from _placement(config, reader)


def _engine(config: Config, reader: Reader) -> Iterator[Problem]:
    rollout = config.rollout
    for key, engines in READ_BY.items():
        if rollout.engine not in engines and getattr(rollout, key) != type(rollout).model_fields[key].default:
            yield reader.problem(
                f"rollout.{key}",
                "rollout.engine",
                why=f'that engine does not read it; leave it out, or set rollout.engine to "{engines[0]}"',
            )
    if rollout.engine == "http" and len(rollout.servers) != rollout.replicas:
        yield reader.problem(
            "rollout.servers",
            "rollout.replicas",
            why="there is one replica a server; name each server by its base URL, such as http://127.0.0.1:8000, and "
            f"set replicas to {max(len(rollout.servers), 1)}",
        )
    if double := [url for url in rollout.servers if rollout.servers.count(url) > 1]:
        yield reader.problem("rollout.servers", why=f"{shown(double[0])} is named twice; name each server once")
    if wrong := [url for url in rollout.servers if not url.startswith(("http://", "https://"))]:
        yield reader.problem("rollout.servers", why=f"{shown(wrong[0])} is no URL; write http://host:port")
    if rollout.engine != "hf" and config.run.determinism == "exact" and not config.seams.replay:
        yield reader.problem(
            "run.determinism",
            "rollout.engine",
            why="that engine forms its batches by what has arrived, and its bits depend on them (with images even "
            'where VLLM_BATCH_INVARIANT=1 is set); set determinism to "fast"',
        )


def _weights(config: Config, reader: Reader) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.in_flight != "finish" and config.staleness.mode == "lockstep":
        yield reader.problem(
            "rollout.in_flight",
            "staleness.mode",
            why="in lockstep every response is of one version, exactly, so that engines take weights once they are "
            'idle; set in_flight to "finish", or staleness.mode to "bounded"',
        )
    if rollout.in_flight == "keep" and rollout.engine != "vllm":
        yield reader.problem(
            "rollout.in_flight",
            "rollout.engine",
            why="that engine takes no weights while it generates; set in_flight to "
            '"finish" or "abort", or engine to "vllm"',
        )
    if rollout.engine != "hf" and config.lora.rank > 0 and config.lora.publish == "adapter":
        yield reader.problem(
            "lora.publish",
            "rollout.engine",
            why='that engine takes whole weights; set lora.publish to "merged"',
        )


def _placement(config: Config, reader: Reader) -> Iterator[Problem]:
    rollout = config.rollout
    if config.cluster.colocate and rollout.engine != "vllm":
        yield reader.problem(
            "cluster.colocate",
            "rollout.engine",
            why='only a vllm engine leaves room for another process on its GPU; set engine to "vllm", or leave it out',
        )
    if config.cluster.colocate and (config.actor.data_parallel != rollout.replicas or rollout.tensor_parallel > 1):
        yield reader.problem(
            "cluster.colocate",
            "actor.data_parallel",
            "rollout.replicas",
            "rollout.tensor_parallel",
            why="a GPU is shared by one rank and one engine of one GPU; make data_parallel and replicas equal, and "
            "tensor_parallel 1",
        )
    if config.cluster.device == "cpu" and config.weight_transfer != "host":
        yield reader.problem(
            "cluster.device",
            "cluster.colocate",
            "rollout.weight_transfer",
            why="weights that stay in GPU memory need a GPU; leave colocate out and set weight_transfer to "
            '"auto", or device to "cuda"',
        )
    if rollout.weight_transfer == "nccl" and config.cluster.colocate:
        yield reader.problem(
            "rollout.weight_transfer",
            "cluster.colocate",
            why='NCCL does not connect two processes on one GPU; set weight_transfer to "auto"',
        )
    if rollout.weight_transfer == "ipc" and not config.cluster.colocate:
        yield reader.problem(
            "rollout.weight_transfer",
            "cluster.colocate",
            why="CUDA IPC is for a GPU that both sides share; set cluster.colocate to true, or weight_transfer to "
            '"auto"',
        )
