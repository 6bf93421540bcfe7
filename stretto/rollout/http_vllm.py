"""The wire format of vLLM's server: what it says of itself, and its route for token ids in and token ids out.

Read from the sources of vLLM 0.26.0 and 0.32.0. ``POST /inference/v1/generate`` takes the prompt's ids as they are and
pixels as tensors, so that the server neither tokenises nor looks at an image. An item of pixels is MessagePack in
base64, as ``vllm.v1.serial_utils.MsgpackEncoder`` writes it; that is repeated here, since vLLM need not be installed
where this runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from stretto.rollout.engine import EngineLost, Sampling
from stretto.types import ProcessedPrompt, StrettoError

GENERATE = "/inference/v1/generate"
RAW_VIEW = 3
"""MessagePack extension type of the raw bytes of a tensor (``vllm.v1.serial_utils.CUSTOM_TYPE_RAW_VIEW``)."""
NOT_GIVEN = -9999.0
"""What stands for a log-prob that the server does not have."""
SUPPRESS_BIAS = -100.0
MOST_BIASED = 1024
"""Ids that the model runner of GPUs takes in ``logit_bias``; more of them end it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What matters of a server.

    ``max_tokens``: of prompt and response together. ``max_requests``: decoded at once."""

    version: str
    model: str
    dtype: str
    device: str
    max_tokens: int
    max_requests: int


def read_facts(url: str, version: str, info: Mapping[str, Any], *, tied: bool, suppressed: int) -> Facts:
    """Of what ``/version`` and ``/server_info?config_format=json`` say. ``tied``: the model's head shares its weight
    with the embeddings. ``suppressed``: ids that no response may hold.

    Raises:
        StrettoError: rollouts of this server could not be trained; every reason, with the flag to set.
    """
    try:
        config = info["vllm_config"]
        model, scheduler = config["model_config"], config["scheduler_config"]
        images = model.get("multimodal_config") or {}
        device = str(config["device_config"]["device"])
        facts = Facts(
            version=version,
            model=str(model["model"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            device=device,
            max_tokens=int(model["max_model_len"]),
            max_requests=int(scheduler["max_num_seqs"]),
        )
        measure, chunked = model["logprobs_mode"], scheduler["enable_chunked_prefill"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StrettoError(
            f"{url}: vLLM {version} describes itself in a form that is not known here (no {error}); known are 0.26 to "
            "0.32"
        ) from None
    wrong: list[str] = []
    if measure != "processed_logprobs":
        wrong.append(
            f"it reports {measure}, taken before masks and temperature; set --logprobs-mode processed_logprobs"
        )
    if images.get("mm_device_do_normalize"):
        wrong.append("it would normalise pixels that are normalised already; set --no-mm-device-do-normalize")
    if model.get("quantization"):
        wrong.append(f"its weights are quantized ({model['quantization']}), and new ones are not; leave it out")
    if device != "cpu" and suppressed > MOST_BIASED:
        wrong.append(
            f"{suppressed} ids have to be masked (special ones, and those past the tokenizer's), and it takes "
            f"{MOST_BIASED}; give the model a vocabulary that is closer to its tokenizer's"
        )
    if device == "cpu" and chunked:
        wrong.append(
            "on a CPU a seeded request whose prompt is cut by the token budget ends it; set "
            "--no-enable-chunked-prefill and --max-num-batched-tokens of at least --max-model-len"
        )
    if device == "cpu" and tied:
        wrong.append(
            "on a CPU it keeps the old head after an update where the head shares its weight with the embeddings "
            '(tie_word_embeddings), and no route mends that; use a GPU server, or rollout.engine = "vllm"'
        )
    if wrong:
        raise StrettoError(f"{url}: vLLM {version} as it was started cannot serve rollouts:\n  " + "\n  ".join(wrong))
    return facts


# Requests ---------------------------------------------------------------------------------------------------------


def features(prompt: ProcessedPrompt, image_token: int, merge_size: int, tag: str) -> dict[str, Any] | None:
    """The images of a prompt as the request's ``features``; None where it has none.

    The hashes name images in the server's caches: they are of the pixels, and of ``tag``, the name of the weights, so
    that nothing that old weights have made of an image is found again.
    """
    if not len(prompt.image_grid_thw):
        return None
    hashes: list[str] = []
    places: list[dict[str, int]] = []
    items: list[str] = []
    patch = token = 0
    image_tokens = np.flatnonzero(prompt.prompt_ids == image_token)
    for grid in prompt.image_grid_thw:
        patches = int(grid.prod())
        pixels = np.ascontiguousarray(prompt.pixel_values[patch : patch + patches], dtype=np.float32)
        length = patches // merge_size**2
        places.append({"offset": int(image_tokens[token]), "length": length})
        items.append(encode_item(pixels, grid))
        digest = hashlib.sha256(pixels.tobytes())
        digest.update(np.asarray(grid, np.int64).tobytes() + tag.encode())
        hashes.append(digest.hexdigest())
        patch, token = patch + patches, token + length
    return {
        "mm_hashes": {"image": hashes},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": items},
    }


def encode_item(pixels: np.ndarray, grid: np.ndarray) -> str:
    """One image: pixels float32 [patches, D] and grid [3], in base64. Flat and batched are vLLM's words for rows of all
    images one after the other, and one entry an image.
    """
    thw = np.ascontiguousarray(grid, dtype=np.int64)
    slices = [[0, len(pixels), None]]
    item = {
        "pixel_values": {
            "data": ["float32", list(pixels.shape), msgpack.ExtType(RAW_VIEW, pixels.tobytes())],
            "field": ["flat", {"keep_on_cpu": False, "slices": slices, "dim": 0}],
        },
        "image_grid_thw": {
            "data": ["int64", [3], msgpack.ExtType(RAW_VIEW, thw.tobytes())],
            "field": ["batched", {"keep_on_cpu": True}],
        },
    }
    return base64.b64encode(msgpack.packb(item)).decode("ascii")


def request_parts(
    prompt: ProcessedPrompt,
    images: Mapping[str, Any] | None,
    seeds: Sequence[int],
    sampling: Sampling,
    *,
    eos_ids: Sequence[int],
    suppressed: Sequence[int],
    tag: str,
) -> list[tuple[bytes, bytes]]:
    """A request for each seed, in two parts: the first, which holds images, is by far the larger, and the same object
    for all.

    EOS ids are ours (``ignore_eos`` keeps the server's own out); the server keeps them in the response. ``tag`` salts
    the prefix cache, as it does the hashes of images.
    """
    common = json.dumps(
        {"token_ids": prompt.prompt_ids.tolist(), "return_token_ids": True, "cache_salt": tag}
        | ({"features": images} if images else {})
    ).encode()
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": sampling.max_tokens,
        "logprobs": 0,
        "logit_bias": {str(i): SUPPRESS_BIAS for i in suppressed},
        "ignore_eos": True,
        "stop_token_ids": list(eos_ids),
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),
    }
    head = common[:-1] + b', "sampling_params": '
    return [(head, json.dumps(params | {"seed": seed}).encode() + b"}") for seed in seeds]


def probe_body(token: int) -> dict[str, Any]:
    """A request whose answer shows the log-prob measure: where only one id is allowed, its log-prob after masks is 0,
    and before them it is not.
    """
    params = {"temperature": 0.5, "max_tokens": 1, "logprobs": 0, "allowed_token_ids": [token], "detokenize": False}
    return {"token_ids": [token], "return_token_ids": True, "sampling_params": params}


# Answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answer:
    """ids int32 [R], logprobs float32 [R], vLLM's word for how it ended, and names of the weights that sampled it
    (None: the server does not say; 0.32 does, 0.26 does not).
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish: str
    tags: tuple[str, ...] | None


def read_answer(url: str, answer: Any, prompt_ids: np.ndarray) -> Answer:
    """Of one request for one response.

    Raises:
        StrettoError: the server read another prompt than it was sent (both are shown), or gave other log-probs than it
            gave tokens.
        EngineLost: it is no answer of vLLM's.
    """
    try:
        _check_prompt(url, answer, prompt_ids)
        (choice,) = answer["choices"]
        ids = [int(i) for i in choice["token_ids"] or ()]
        content = (choice["logprobs"] or {}).get("content") or []
        scored = [_scored(entry) for entry in content]
        spans = choice.get("weight_versions")
        tags = None if spans is None else tuple(str(span["version"]) for span in spans)
        finish = str(choice["finish_reason"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        shown = json.dumps(answer)[:500]
        raise EngineLost(
            f"POST {url}{GENERATE}: not an answer of vLLM ({type(error).__name__} {error}): {shown}"
        ) from None
    if [i for i, _ in scored] != ids:
        raise StrettoError(
            f"POST {url}{GENERATE}: log-probs do not fit the response: {len(scored)} log-probs, of ids "
            f"{[i for i, _ in scored][:50]}, for {len(ids)} ids {ids[:50]}"
        )
    logprobs = np.asarray([p for _, p in scored], dtype=np.float32)
    return Answer(ids=np.asarray(ids, dtype=np.int32), logprobs=logprobs, finish=finish, tags=tags)


def _check_prompt(url: str, answer: Any, prompt_ids: np.ndarray) -> None:
    read = answer.get("prompt_token_ids")
    if read is not None and read != prompt_ids.tolist():
        raise StrettoError(
            f"POST {url}{GENERATE}: the server read another prompt than it was sent\n  sent {prompt_ids.tolist()}\n  "
            f"read {read}"
        )
    count = answer["usage"]["prompt_tokens"]  # 0.26 says no more
    if count != len(prompt_ids):
        raise StrettoError(
            f"POST {url}{GENERATE}: the server read a prompt of {count} tokens, {len(prompt_ids)} were sent: "
            f"{prompt_ids.tolist()}"
        )


def _scored(entry: Mapping[str, Any]) -> tuple[int, float]:
    """Id and log-prob; 0.26 has the id in a word, ``token_id:42``."""
    token = entry["token_id"] if "token_id" in entry else str(entry["token"]).removeprefix("token_id:")
    logprob = entry.get("logprob")
    given = logprob is not None and math.isfinite(logprob) and logprob > NOT_GIVEN
    return int(token), float(logprob) if given and logprob is not None else math.nan


def weight_name(published: str) -> str:
    """vLLM's name of a published weight, where it holds it unfused."""
    for old, new in (("model.visual.", "visual."), ("model.language_model.", "language_model.model.")):
        if published.startswith(old):
            return new + published.removeprefix(old)
    return f"language_model.{published}"


def is_norm(name: str) -> bool:
    """Whether it is a weight of a norm: those vLLM holds as they were published, on each of its workers. Others it may
    fuse, pad, pack or split.
    """
    return "norm" in name.split(".")[-2]
