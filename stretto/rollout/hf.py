"""The ``hf`` engine: transformers' model, a prefill per prompt, its cache repeated n times, batched decode.

``generate()`` of transformers is not used: it samples from one shared generator (tokens would depend on the rest of
the batch), prefills every sample, and takes log-probs by another measure.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from stretto.models.batch import ModelInputs
from stretto.models.logprobs import scaled_logits
from stretto.models.qwen3_vl import Qwen3VL
from stretto.models.weights_io import load_buckets
from stretto.rollout.engine import EngineLost, GroupRequest, Sampling, Weights
from stretto.rollout.noise import gumbel, sample_key
from stretto.types import FinishReason, Response


@dataclass
class _Row:
    """A response while it is decoded."""

    key: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    text: str | None = None


class HfEngine:
    """Decodes on one thread of its own, so that the event loop stays free.

    Rows leave the decode batch by their own tokens only, and padding is fixed by the prompts of the call: the bits of a
    response are a pure function of the call's requests, the weights and the sampling.
    """

    fixed_batches = True
    batch_invariant = False
    live_update = False
    concurrency = 1

    def __init__(self, family: Qwen3VL, make_model: Callable[[], nn.Module], device: torch.device | str):
        self.family = family
        self.device = torch.device(device)
        self.suppressed_V = family.suppressed_V.to(self.device)
        self._version = -1
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._make_model = make_model
        self._model: nn.Module | None = None
        self._killed = threading.Event()

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> Mapping[str, Any]:
        """Builds the model, on the engine's thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self.model)
        return {}

    async def load_weights(self, version: int, weights: Weights) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load, version, weights)

    def _load(self, version: int, weights: Weights) -> None:
        load_buckets(self.model, weights)
        self._version = version

    @property
    def model(self) -> nn.Module:
        """Built on first use."""
        if self._model is None:
            self._model = self._make_model().to(self.device).eval()
        return self._model

    async def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Response]]:
        aborted = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self.decode, requests, sampling, aborted
            )
        finally:
            aborted.set()  # without effect where it is done

    def kill(self) -> None:
        self._killed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    @torch.no_grad()
    def decode(
        self, requests: Sequence[GroupRequest], sampling: Sampling, aborted: threading.Event | None = None
    ) -> list[list[Response]]:
        """The decode loop, blocking. Responses come in request order, ``sampling.n`` each; ``aborted`` ends it.

        Raises EngineLost where it was ended early.
        """
        rows = [_Row(sample_key(sampling.seed, r.partition, r.group, i)) for r in requests for i in range(sampling.n)]
        cache = DynamicCache(config=self.family.config.text_config)
        batch = self.family.collate_prompts([r.prompt for r in requests], self.device)
        hidden = self.family.hidden_states(self.model, batch.inputs, cache)[:, -1]
        logits = self.family.logits(self.model, hidden).repeat_interleave(sampling.n, dim=0)
        cache.batch_repeat_interleave(sampling.n)
        position = batch.next_position.repeat_interleave(sampling.n)
        mask = batch.inputs.attention_mask
        mask = None if mask is None else mask.repeat_interleave(sampling.n, dim=0)

        active = rows
        for step in range(sampling.max_tokens):
            if self._killed.is_set() or (aborted is not None and aborted.is_set()):
                raise EngineLost("it was told to stop while it generated")
            token, logprob = self._sample(logits, active, step, sampling)
            keep = self._record(active, token.tolist(), logprob.tolist(), sampling)
            if not keep or step + 1 == sampling.max_tokens:
                break
            if len(keep) < len(active):
                index = torch.tensor(keep, device=self.device)
                active = [active[i] for i in keep]
                token, position = token[index], position[index]
                mask = None if mask is None else mask[index]
                cache.batch_select_indices(index)
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            logits = self.family.logits(self.model, self._step(token, position, mask, cache))
            position = position + 1
        responses = [self._response(row) for row in rows]
        return [responses[i : i + sampling.n] for i in range(0, len(responses), sampling.n)]

    def _step(self, token: Tensor, position: Tensor, mask: Tensor | None, cache: DynamicCache) -> Tensor:
        inputs = ModelInputs(
            input_ids=token[:, None],
            position_ids=position[None, :, None].expand(3, -1, 1),
            attention_mask=mask,
            pixel_values=None,
            image_grid_thw=None,
            image_token_index=None,
        )
        return self.family.hidden_states(self.model, inputs, cache)[:, -1]

    def _sample(self, logits: Tensor, rows: list[_Row], step: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Next token int64 [B] and its log-prob float32 [B] by the one measure (greedy reports temperature 1)."""
        temperature = sampling.temperature or 1.0
        logprobs = torch.log_softmax(scaled_logits(logits, self.suppressed_V, temperature), dim=-1)
        scores = logprobs
        if sampling.temperature > 0:
            scores = logprobs + gumbel([r.key for r in rows], step, logprobs.shape[-1], self.device)
        token = scores.argmax(dim=-1)
        return token, logprobs.gather(-1, token[:, None])[:, 0]

    def _record(self, rows: list[_Row], tokens: list[int], logprobs: list[float], sampling: Sampling) -> list[int]:
        """Append the step's tokens, mark finished rows, return the indexes of those that go on."""
        keep = []
        for i, row in enumerate(rows):
            row.ids.append(tokens[i])
            row.logprobs.append(logprobs[i])
            if tokens[i] in self.family.eos_ids:
                row.finish = "stop"
            elif sampling.stop and (text := self._stopped(row.ids, sampling.stop)) is not None:
                row.finish, row.text = "stop", text
            else:
                keep.append(i)
        return keep

    def _stopped(self, ids: list[int], stop: tuple[str, ...]) -> str | None:
        """The text before the first stop string, or None. Its tokens stay in the response; no EOS is invented.

        Every token holds at least one byte, so a stop string lies within as many last tokens as it has characters
        (and a few for characters of several bytes); only that tail is decoded at each step.
        """
        tail = self.family.decode(ids[-(max(len(s) for s in stop) + 8) :])
        if not any(s in tail for s in stop):
            return None
        text = self.family.decode(ids)
        found = [at for at in (text.find(s) for s in stop) if at >= 0]
        return text[: min(found)] if found else None

    def _response(self, row: _Row) -> Response:
        return Response(
            token_ids=np.asarray(row.ids, dtype=np.int32),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            text=self.family.decode(row.ids) if row.text is None else row.text,
            finish_reason=row.finish or "length",
            version_start=self._version,
            version_end=self._version,
        )
