"""The ``http`` engine: a vLLM server that someone else runs, behind the same protocol as the others.

::

    start         health ─► version, server_info: refused where its log-probs or pixels would be wrong ─► a probe
    generate      POST /inference/v1/generate, one request a response: ids and pixels in, ids and log-probs out
    load_weights  a folder on a shared file system ─► pause ─► reload_weights ─► reset caches ─► checksums ─► resume

The server has to be as it was started: nothing of Stretto is installed there. See docs/http-engines.md for its flags,
and for what cannot be checked over HTTP. One engine is one server; the router balances over them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from stretto.models.qwen3_vl import Qwen3VL
from stretto.models.weights_io import check_arrived
from stretto.rollout import http_vllm as wire
from stretto.rollout.engine import EngineLost, GroupRequest, Sampling, Weights
from stretto.rollout.http_client import HttpClient, Refused
from stretto.rollout.http_weights import WeightFolder, digests
from stretto.rollout.noise import sample_key
from stretto.rollout.together import together
from stretto.types import FinishReason, Response, StrettoError

START_S = 30.0
"""How long a server may take to say that it is well."""
RESTART_S = 300.0
"""The same for one that this run has used before: its owner has restarted it, and it loads its model."""
RESET_S = 10.0
"""How long caches may take to be free of what ran before."""
RELOAD = "/collective_rpc"

T = TypeVar("T")


class HttpEngine:
    """Rollouts of the server at ``url``.

    ``shapes``: those of all weights of a version. ``folder``: parent of the folders that weights are written to, on a
    file system that the server mounts at the same path. ``samples``: responses of one group, for ``concurrency``.
    ``timeout_s`` bounds each wait for an answer.
    """

    fixed_batches = False
    batch_invariant = False
    live_update = False

    def __init__(
        self,
        family: Qwen3VL,
        url: str,
        *,
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        folder: Path,
        samples: int,
        timeout_s: float,
    ):
        self.family = family
        self.client = HttpClient(url, timeout_s=timeout_s)
        self.url = self.client.url
        self.concurrency = 1
        self._samples = samples
        self._parent = folder
        self._used = folder / f"used-{re.sub(r'[^0-9A-Za-z]+', '-', self.url)}"
        self._shapes = shapes
        self._suppressed = np.flatnonzero(family.suppressed_V.numpy()).tolist()
        self._version = -1
        self._tag = f"stretto-{secrets.token_hex(4)}"
        """The name of the weights in use, never used before; of those it was started with, before the first update."""
        self._tells_tags = False
        self._alike: set[str] = set()
        """Weights that the server holds as they are published, by its names; found at the first update."""
        self._started_at: str | None = None
        self._weights: WeightFolder | None = None
        self._facts: wire.Facts | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._killed = False

    @property
    def version(self) -> int:
        return self._version

    # Start ---------------------------------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, Any]:
        """Raises StrettoError where the server, as it was started, would give wrong tokens, log-probs or weights."""
        try:
            return await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> Mapping[str, Any]:
        await self.client.healthy_within(RESTART_S if self._used.exists() else START_S)
        self._weights = await asyncio.to_thread(WeightFolder, self._parent)
        self._used.touch()
        facts = self._facts = await self._read_facts()
        if (await self.client.get("/is_paused"))["is_paused"]:  # by a run that ended within an update
            await self.client.post("/resume")
        self._tells_tags = await self._probe_logprobs() is not None and await self._has("/weight_info")
        await self._probe_folder()
        started_at = await self._server_start()
        self.concurrency = max(1, facts.max_requests // self._samples)
        return {
            "server": self.url,
            "vllm": facts.version,
            "server_model": facts.model,
            "server_dtype": facts.dtype,
            "server_device": facts.device,
            "restart_seen_by": "weight version" if self._tells_tags else "process start" if started_at else "nothing",
        }

    async def _has(self, path: str) -> bool:
        try:
            await self.client.get(path)
        except Refused:
            return False
        return True

    async def _read_facts(self) -> wire.Facts:
        version = str(
            (await self._told("/version", "is this a vLLM server? Those of SGLang are not supported"))["version"]
        )
        dev = "set VLLM_SERVER_DEV_MODE=1 in its environment (keep its port from strangers: docs/http-engines.md)"
        info = await self._told("/server_info?config_format=json", dev)
        await self._told("/is_paused", dev)
        tied = bool(self.family.config.tie_word_embeddings)
        return wire.read_facts(self.url, version, info, tied=tied, suppressed=len(self._suppressed))

    async def _told(self, path: str, remedy: str) -> Any:
        try:
            return await self.client.get(path)
        except Refused as error:
            raise StrettoError(f"{error}; {remedy}") from None

    async def _probe_logprobs(self) -> tuple[str, ...] | None:
        """That the route for token ids is on, and by which measure log-probs are taken, whatever its options say. The
        names of the weights that answered, see ``wire.Answer``.
        """
        token = int(self.family.eos_ids[0])
        try:
            answer = await self.client.post(wire.GENERATE, wire.probe_body(token))
        except Refused as error:
            raise StrettoError(f"{error}; rollouts need that route: set --enable-scale-out (vLLM 0.32)") from None
        read = wire.read_answer(self.url, answer, np.array([token], np.int32))
        if read.logprobs.tolist() != [0.0]:
            raise StrettoError(
                f"{self.url}: the only token that a request allowed has log-prob {read.logprobs.tolist()}, not 0: "
                "log-probs are taken before masks and temperature; set --logprobs-mode processed_logprobs"
            )
        return read.tags

    async def _probe_folder(self) -> None:
        """That the server reads the folder that weights are written to. An update that finds out leaves it broken; this
        one, of no weights, changes nothing.
        """
        path = await asyncio.to_thread(self._folder.probe)
        try:
            await self._reload(path, is_checkpoint_format=False)
        except (EngineLost, StrettoError) as error:
            if wrong := await self.client.health():
                raise EngineLost(wrong) from None
            raise StrettoError(
                f"{self.url} cannot read weights from {path} ({error}); put run.dir on a file system that the server "
                "mounts at the same path"
            ) from None

    # Weights -------------------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> WeightFolder:
        assert self._weights is not None, "not started"
        return self._weights

    async def load_weights(self, version: int, weights: Weights) -> None:
        """Any failure leaves the server with weights that nobody knows, so it ends the engine."""
        await self._run(self._load(version, weights))

    async def _load(self, version: int, weights: Weights) -> None:
        assert self._facts is not None
        self._version = -1
        await asyncio.to_thread(check_arrived, weights, self._shapes())
        try:
            path = await asyncio.to_thread(self._folder.write, version, weights)
        except OSError as error:
            raise StrettoError(
                f"weights of version {version} cannot be written to {self._folder.path}: {error}"
            ) from None
        tag = f"stretto-{secrets.token_hex(4)}-version-{version}"
        await self.client.post("/pause?mode=wait&clear_cache=true")
        try:
            await self._reload(path)
            await self._reset_caches()
        except Refused as error:  # it was understood before: what it refuses now is its own state
            raise EngineLost(str(error)) from None
        await self._compare(weights)
        if self._tells_tags:
            await self.client.post("/update_weight_version", {"new_version": tag})
        self._started_at = await self._server_start()
        await self.client.post("/resume")
        await asyncio.to_thread(self._folder.keep_only, path)
        self._tag, self._version = tag, version

    async def _reload(self, path: Path, **others: Any) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path), **others}}
        await self.client.post(RELOAD, body)

    async def _reset_caches(self) -> None:
        """Names and salts keep old entries from being found; this gives their memory back."""
        end = asyncio.get_running_loop().time() + RESET_S
        while not (await self.client.post("/reset_prefix_cache"))["success"]:
            if asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(0.1)
        await self.client.post("/reset_mm_cache")
        await self.client.post("/reset_encoder_cache")

    async def _compare(self, weights: Weights) -> None:
        """Weights as the server's workers hold them, with those that were published.

        Which of them it holds as they are depends on the device and on its kernels. So norms must be alike, and so must
        all others that were alike after the first update.

        Raises StrettoError where one differs.
        """
        assert self._facts is not None
        dtype = getattr(torch, self._facts.dtype)
        try:
            answer, ours = await asyncio.gather(
                self.client.post("/weight_checker", {"action": "checksum"}),
                asyncio.to_thread(digests, weights, dtype),
            )
        except Refused as error:
            if error.status == 404:  # as that of 0.26: what arrived is not known
                return
            raise
        given = {wire.weight_name(name): digest for name, digest in ours.items()}
        held = {name: digest for name, digest in answer["checksums"].items() if _plain(name) in given}
        alike = {name for name, digest in held.items() if digest == given[_plain(name)]}
        must = self._alike or {name for name in held if wire.is_norm(name)}
        if not must <= alike or not alike:
            wrong = sorted(must - alike)
            what = f"{len(wrong)} of {len(must)} differ, the first is {wrong[0]!r}" if wrong else "none is known there"
            raise StrettoError(
                f"{self.url}: after an update the server holds other weights than it was given ({what}); is it the "
                "same model as the trainer's?"
            )
        self._alike = self._alike or alike

    async def _server_start(self) -> str | None:
        """When its process was started, as it reports it; None where it does not."""
        text = await self.client.text("/metrics")
        found = re.search(r"^process_start_time_seconds (\S+)$", text, re.MULTILINE)
        return found.group(1) if found else None

    # Rollouts ------------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Response]]:
        return await self._run(self._generate(requests, sampling))

    async def _generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Response]]:
        assert self._facts is not None, "not started"
        for request in requests:
            needed = len(request.prompt.prompt_ids) + sampling.max_tokens
            if needed > self._facts.max_tokens:  # it would cut the response without a word
                raise StrettoError(
                    f"{self.url}: a prompt of {len(request.prompt.prompt_ids)} tokens and rollout.max_response_tokens "
                    f"= {sampling.max_tokens} are {needed} tokens; the server takes {self._facts.max_tokens}: set "
                    "--max-model-len higher"
                )
        groups = await together(self._group(request, sampling) for request in requests)
        if self._version >= 0 and not self._tells_tags and await self._server_start() != self._started_at:
            raise EngineLost(f"{self.url} was restarted, and has lost the weights of version {self._version}")
        return groups

    async def _group(self, request: GroupRequest, sampling: Sampling) -> list[Response]:
        prompt = request.prompt
        keys = [sample_key(sampling.seed, request.partition, request.group, i) for i in range(sampling.n)]
        parts = await asyncio.to_thread(
            lambda: wire.request_parts(
                prompt,
                wire.features(prompt, self.family.config.image_token_id, self.family.merge_size, self._tag),
                [key & (2**63 - 1) for key in keys],
                sampling,
                eos_ids=self.family.eos_ids,
                suppressed=self._suppressed,
                tag=self._tag,
            )
        )
        answers = await together(self.client.post(wire.GENERATE, part) for part in parts)
        return [self._response(wire.read_answer(self.url, a, prompt.prompt_ids), sampling) for a in answers]

    def _response(self, answer: wire.Answer, sampling: Sampling) -> Response:
        if self._version >= 0 and answer.tags is not None and set(answer.tags) - {self._tag}:
            raise EngineLost(
                f"{self.url} sampled by weights {sorted(set(answer.tags))}, not by {self._tag!r} that it was given: it "
                "was restarted, or serves another run, too"
            )
        finish, error = self._outcome(answer)
        scored = np.isfinite(answer.logprobs)
        kept = len(scored) if scored.all() else int(scored.argmin())  # those without log-probs are of no use
        text = self.family.decode(answer.ids)
        cuts = [at for at in (text.find(s) for s in sampling.stop) if at >= 0]
        return Response(
            token_ids=answer.ids[:kept],
            logprobs=answer.logprobs[:kept],
            text=text[: min(cuts)] if cuts else text,
            finish_reason=finish,
            version_start=self._version,
            version_end=self._version,
            error=error,
        )

    def _outcome(self, answer: wire.Answer) -> tuple[FinishReason, str | None]:
        """How a response ended, and why it failed where it did."""
        if answer.finish == "abort":
            return "abort", "the server aborted the response"
        if answer.finish not in ("stop", "length"):
            return "error", f"the server ended the response by {answer.finish!r}"
        suppressed = self.family.suppressed_V
        if bad := sorted({int(i) for i in answer.ids if i >= len(suppressed) or suppressed[i]}):
            return "error", f"the response holds ids that none may hold: {bad}"
        if not np.isfinite(answer.logprobs).all():
            return "error", "the server gave no log-prob for a token of the response"
        return ("stop" if answer.finish == "stop" else "length"), None

    # End -----------------------------------------------------------------------------------------------------------

    async def _run(self, work: Awaitable[T]) -> T:
        """A call, as long as the server is well; what ends it says how the server is."""
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self.client.watch())
        self._tasks.add(task)
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            if self._killed:
                raise EngineLost("it was told to stop while it worked")
            return await task
        except EngineLost as error:
            if self._killed:
                raise
            state = await self.client.health() or f"GET {self.url}/health says that it is well"
            raise EngineLost(str(error) if state in str(error) else f"{error}; {state}") from None
        finally:
            self._tasks.discard(task)
            for one in (task, watch):
                one.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await one

    def kill(self) -> None:
        self._killed = True
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """The server goes on; what it has been told to generate ends with the connections."""
        self.kill()
        await self.client.close()
        if self._weights is not None:
            await asyncio.to_thread(self._weights.remove)


def _plain(name: str) -> str:
    """The name of a weight without the worker's, ``dp0:pp0:pcp0:tp0:visual.merger.norm.weight``."""
    return name.rpartition(":")[2]
