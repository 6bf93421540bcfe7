"""What is asked of vLLM for a sample, and the ``Response`` that is made of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto.models.qwen3_vl import Qwen3VL
from stretto.rollout.engine import Sampling
from stretto.types import Response, StrettoError

MASKED = -100.0
"""Logit bias of ids that a response never holds. vLLM has no other mask that all of its runners take for some hundred
ids; what is left of their probability, exp(-100), is lost in rounding."""


def sampling_params(sampling: Sampling, key: int, eos_ids: Sequence[int], suppressed: Sequence[int]) -> Any:
    """vLLM's ``SamplingParams`` of one sample, whose noise is named by ``key``."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=key & (2**63 - 1),
        logprobs=0,  # of the sampled token alone
        logit_bias=dict.fromkeys(suppressed, MASKED),
        ignore_eos=True,  # vLLM's idea of it: ours comes next
        stop_token_ids=list(eos_ids),
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class Spans:
    """Which versions the tokens of a response were sampled under, as first tokens of runs."""

    def __init__(self, version: int):
        self._runs = [(version, 0)]

    def begin(self, version: int, tokens: int) -> None:
        """All after the first ``tokens`` are by ``version``."""
        self._runs = [run for run in self._runs if run[1] < tokens] + [(version, tokens)]

    def versions(self, tokens: int) -> np.ndarray:
        """int32 [tokens]."""
        stamps = np.empty(tokens, dtype=np.int32)
        for version, begin in self._runs:
            stamps[begin:] = version
        return stamps

    @property
    def newest(self) -> int:
        return self._runs[-1][0]


def response(output: Any, spans: Spans, sampling: Sampling, family: Qwen3VL) -> Response:
    """From the last ``RequestOutput`` of a sample."""
    answer = output.outputs[0]
    ids = np.asarray(answer.token_ids, dtype=np.int32)
    logprobs = np.asarray([p[i].logprob for i, p in zip(answer.token_ids, answer.logprobs or (), strict=True)])
    stamps = spans.versions(len(ids))
    error, finish = None, answer.finish_reason
    if finish not in ("stop", "length"):
        finish = "abort" if finish == "abort" else "error"
        error = f"vLLM ended the request after {len(ids)} tokens ({answer.finish_reason})"
    elif family.suppressed_V[ids].any():
        finish = "error"
        error = f"vLLM sampled id {ids[family.suppressed_V[ids]][0]}, which a response must not hold"
    mixed = len(ids) > 0 and stamps[0] != stamps[-1]
    return Response(
        token_ids=ids,
        logprobs=logprobs.astype(np.float32),
        text=_text(family.decode(ids), sampling.stop),
        finish_reason=finish,
        version_start=int(stamps[0]) if len(ids) else spans.newest,
        version_end=int(stamps[-1]) if len(ids) else spans.newest,
        error=error,
        token_versions=stamps if mixed else None,
    )


def _text(text: str, stop: Sequence[str]) -> str:
    """What comes before the first stop string."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else text


def check_prompt(sent: np.ndarray, returned: Sequence[int] | None) -> None:
    """Raises StrettoError where vLLM has read other ids than it was given."""
    if returned is not None and list(returned) != sent.tolist():
        raise StrettoError(
            f"vLLM has read another prompt than the trainer has; sent {sent.tolist()}, read {list(returned)}; its "
            "processor must not touch prompts: report this with vLLM's version"
        )
