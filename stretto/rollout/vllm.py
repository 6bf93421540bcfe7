"""The ``vllm`` engine: vLLM's ``AsyncLLM``, whose core and workers are processes of their own.

    this process                           core process                  worker processes (one a GPU)
    prompts, ids in and out  ── ZeroMQ ──► scheduler                ──►  model
    weights, by a Transfer   ── utility ─► pause, caches, resume    ──►  vllm_worker.py

vLLM forms its batches itself, by what has arrived: the engine has no fixed batches, and takes new weights while it
generates. For that it is paused between two steps, with what is under way kept; all keys, values and image features of
the old weights are dropped, and computed again under the new ones when it goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stretto.config import Config
from stretto.models.loading import load_model, save_model
from stretto.models.qwen3_vl import Qwen3VL
from stretto.rollout import vllm_compat
from stretto.rollout.engine import EngineLost, GroupRequest, Sampling, Weights
from stretto.rollout.noise import sample_key
from stretto.rollout.together import together
from stretto.rollout.vllm_args import engine_arguments
from stretto.rollout.vllm_inputs import engine_input
from stretto.rollout.vllm_outputs import Spans, check_prompt, response, sampling_params
from stretto.rollout.vllm_processes import Processes
from stretto.rollout.vllm_transfer import Transfer
from stretto.types import Response, StrettoError

CLOSE_S = 0.5


class VllmEngine:
    """One replica on ``device`` (cpu or cuda); new weights come by ``transfer``."""

    fixed_batches = False
    live_update = True
    batch_invariant = False
    """Not with VLLM_BATCH_INVARIANT=1 either: on an H200 (0.26) the bits of prompts with images depended on what had
    arrived with them (results/gpu-h200-5.md)."""

    def __init__(self, family: Qwen3VL, config: Config, device: str, transfer: Transfer):
        self.family = family
        self.config = config
        self.device = device
        self.concurrency = 1
        self._suppressed = torch.nonzero(family.suppressed_V)[:, 0].tolist()
        self._transfer = transfer
        self._version = -1
        self._names = itertools.count()
        self._spans: dict[str, Spans] = {}
        self._updating = asyncio.Lock()
        self._processes: Processes | None = None
        self._llm: Any = None
        self._max_model_len = 0

    @property
    def version(self) -> int:
        return self._version

    # Starting and ending -------------------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, Any]:
        """Raises ConfigError for engine arguments that can not be used, StrettoError where vLLM is not installed."""
        release = vllm_compat.release()
        alone = not self.config.cluster.address
        vllm_compat.prepare_environment(self.device, torch.get_num_threads(), loopback=alone)
        Path(self.config.run.dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="vllm-model-", dir=self.config.run.dir) as folder:
            arguments = await asyncio.to_thread(self._arguments, folder)
            self._llm = await asyncio.to_thread(vllm_compat.start, arguments, self._transfer.backend)
        self._processes = Processes(vllm_compat.processes(self._llm))
        vllm_compat.unlink_segments(self._llm)
        self._progress = vllm_compat.Progress(self._llm)
        await self._processes.alive(vllm_compat.warm_up(self._llm))
        self._max_model_len = arguments["max_model_len"]
        self.concurrency = max(1, arguments["max_num_seqs"] // self.config.rollout.n_samples_per_prompt)
        return {"vllm": release, "weight_transfer": self._transfer.backend, "engine_args": arguments}

    def _arguments(self, folder: str) -> dict[str, Any]:
        """``folder``: where a random model is written for vLLM to read."""
        model = self.config.model
        if not model.path:
            save_model(self.family, load_model(model, self.config.run.seed), Path(folder))
        longest = self.family.config.text_config.max_position_embeddings
        known = vllm_compat.argument_names()
        return engine_arguments(self.config, model.path or folder, longest, self.device, known)

    def kill(self) -> None:
        self._transfer.close()
        if self._processes is not None:
            vllm_compat.expect_end(self._llm)
            self._processes.kill()

    async def close(self) -> None:
        """vLLM by itself would take five seconds, and nothing of an engine is worth them."""
        self.kill()
        if self._processes is not None:
            await self._processes.wait(CLOSE_S)
            self._processes, llm, self._llm = None, self._llm, None
            await asyncio.to_thread(llm.shutdown, 0)

    # Weights -------------------------------------------------------------------------------------------------------

    async def load_weights(self, version: int, weights: Weights) -> None:
        """Raises StrettoError for weights that do not fit the model (nothing has changed then), or where the engine
        holds others afterwards; EngineLost for whatever else goes wrong, since it then holds neither version whole.
        """
        assert self._processes is not None
        async with self._updating:
            await asyncio.to_thread(self._transfer.check, version, weights)
            try:
                await self._processes.alive(self._update(version, weights))
            except (StrettoError, EngineLost):
                raise
            except Exception as error:
                raise EngineLost(f"taking version {version} failed: {type(error).__name__}: {error}") from error

    async def _update(self, version: int, weights: Weights) -> None:
        llm = self._llm
        await llm.pause_generation(mode="keep", clear_cache=True)
        tokens = await self._progress.tokens(self._spans)
        before = set(self._spans)
        await llm.start_weight_update()
        sampled = await self._transfer.send(version, weights, partial(vllm_compat.update_weights, llm))
        await llm.finish_weight_update()
        answers = await llm.collective_rpc("stretto_differing", args=([list(astuple(s)) for s in sampled],))
        if differing := sorted({text for worker in answers for text in worker}):
            raise StrettoError(
                f"after taking version {version} the engine holds other weights than the actor sent, in "
                f"{len(differing)} of {len(sampled)} tensors that were compared: {differing[0]}"
            )
        self._version = version
        for name, spans in self._spans.items():
            if name in tokens or name not in before:  # others have ended; or came meanwhile, and wait
                spans.begin(version, tokens.get(name, 0))
        await llm.resume_generation()

    # Responses -----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Response]]:
        """Raises StrettoError for a prompt that the engine can not take, EngineLost where vLLM has died."""
        assert self._processes is not None
        for request in requests:
            self._check_length(request, sampling)
        inputs = await asyncio.to_thread(
            lambda: [engine_input(request.prompt, self.family.merge_size) for request in requests]
        )
        samples = [
            self._sample(request, prompt, sampling, i)
            for request, prompt in zip(requests, inputs, strict=True)
            for i in range(sampling.n)
        ]
        responses = await self._processes.alive(together(samples))
        return [responses[i : i + sampling.n] for i in range(0, len(responses), sampling.n)]

    def _check_length(self, request: GroupRequest, sampling: Sampling) -> None:
        """vLLM would cut the response without a word."""
        tokens = len(request.prompt.prompt_ids)
        if tokens + sampling.max_tokens > self._max_model_len:
            raise StrettoError(
                f"group {request.group} of partition {request.partition}: its prompt of {tokens} tokens and a response "
                f"of {sampling.max_tokens} do not fit rollout.engine_args.max_model_len = {self._max_model_len}; raise "
                "it, or drop such prompts (data.max_prompt_tokens)"
            )

    async def _sample(self, request: GroupRequest, prompt: Any, sampling: Sampling, index: int) -> Response:
        key = sample_key(sampling.seed, request.partition, request.group, index)
        name = str(next(self._names))
        spans = self._spans[name] = Spans(self._version)
        try:
            params = sampling_params(sampling, key, self.family.eos_ids, self._suppressed)
            async for output in self._llm.generate(prompt, params, name):
                last = output
        except Exception as error:
            if vllm_compat.is_refusal(error):
                raise StrettoError(
                    f"vLLM refuses group {request.group} of partition {request.partition}: {error}"
                ) from error
            raise EngineLost(f"vLLM failed: {type(error).__name__}: {error}") from error
        finally:
            del self._spans[name]
        check_prompt(request.prompt.prompt_ids, last.prompt_token_ids)
        return response(last, spans, sampling, self.family)
