"""The arguments that a vLLM engine is started with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from stretto.config import Config
from stretto.types import ConfigError
from stretto.wording import nearest

KV_CACHE_BYTES = 2**30
"""Of an engine on the CPU."""
BATCHED_TOKENS = 8192
"""Of one step on the CPU, where no prompt may be cut."""
SHARED_KV_CACHE_BYTES = 8 * 2**30
SHARED_GPU = 0.2
"""Share of a GPU that must be free when an engine starts on one that it shares with an actor rank."""
SEQUENCES = 256
IMAGES = 64
"""Most images of a prompt."""
WORKER = "stretto.rollout.vllm_worker.WorkerExtension"
RESERVED = {
    "model": "set model.path",
    "tokenizer": "set model.path",
    "hf_config_path": "set model.path",
    "dtype": "set model.dtype",
    "seed": "set run.seed",
    "tensor_parallel_size": "set rollout.tensor_parallel",
    "pipeline_parallel_size": "set rollout.tensor_parallel",
    "data_parallel_size": "set rollout.replicas",
    "weight_transfer_config": "set rollout.weight_transfer",
    "enable_lora": 'set lora.publish to "merged"',
    "quantization": "weights are published as they are trained; leave it out",
    "speculative_config": "a draft model would never get new weights; leave it out",
    "logprobs_mode": "training compares these log-probs with its own; leave it out",
    "generation_config": "sampling is set by rollout.temperature and its like; leave it out",
    "override_generation_config": "sampling is set by rollout.temperature and its like; leave it out",
    "worker_extension_cls": "weights arrive through it; leave it out",
    "mm_device_do_normalize": "pixels come normalised; leave it out",
    "mm_processor_cache_gb": "no image is processed there; leave it out",
}
"""Arguments that a user can not set, each with the remedy."""


def engine_arguments(config: Config, folder: str, longest: int, device: str, known: Collection[str]) -> dict[str, Any]:
    """``AsyncEngineArgs`` of one engine: what the rest of Stretto relies on, and defaults that ``rollout.engine_args``
    may replace.

    ``folder``: of the model. ``longest``: tokens that the model can hold. ``known``: argument names of the
    installed release.

    Raises:
        ConfigError: ``rollout.engine_args`` holds one of ours, or one that this release does not know.
    """
    asked = config.rollout.engine_args
    _check(asked, known)
    most = config.actor.max_tokens_per_microbatch
    if config.data.max_prompt_tokens:
        most = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    defaults: dict[str, Any] = {
        "max_model_len": min(longest, most),
        "max_num_seqs": SEQUENCES,
        "limit_mm_per_prompt": {"image": IMAGES, "video": 0},
        "disable_log_stats": True,
    }
    if device == "cpu":
        defaults |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "skip_mm_profiling": True,
            # A seeded request whose prefill is cut by the budget ends a CPU engine (0.32).
            "enable_chunked_prefill": False,
        }
    if config.cluster.colocate:  # what an actor beside it allocates meanwhile would spoil vLLM's own measurement
        defaults |= {"kv_cache_memory_bytes": SHARED_KV_CACHE_BYTES, "gpu_memory_utilization": SHARED_GPU}
    if config.rollout.tensor_parallel > 1:
        defaults["distributed_executor_backend"] = "mp"  # in a Ray actor vLLM might take Ray's
    chosen = defaults | asked
    if device == "cpu":
        chosen.setdefault("max_num_batched_tokens", max(BATCHED_TOKENS, chosen["max_model_len"]))
    ours = {
        "model": folder,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "tensor_parallel_size": config.rollout.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # its own defaults, not the model's
        "worker_extension_cls": WORKER,
        "mm_device_do_normalize": False,  # 0.26 has no such argument: it never does
        "mm_processor_cache_gb": 0,
    }
    return chosen | {name: value for name, value in ours.items() if name in known}


def _check(asked: Mapping[str, Any], known: Collection[str]) -> None:
    problems = []
    for name in asked:
        if name in RESERVED:
            problems.append(f"rollout.engine_args.{name}: Stretto sets it itself: {RESERVED[name]}")
        elif name not in known:
            problems.append(
                f"rollout.engine_args.{name}: this vLLM has no such engine argument; did you mean "
                f"{nearest(name, known)!r}?"
            )
    if problems:
        raise ConfigError(problems)
