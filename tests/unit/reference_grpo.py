"""GRPO in plain PyTorch, one file, one sample at a time, written from the papers for comparison with the engine.

Nothing here comes from the engine: the model is called as transformers documents it, log-probs, advantages, importance
weights, clipping, aggregation, gradient clipping and AdamW are spelled out per sample and per token.

A sample is a dict: group, prompt (list of ids), types (list, 1 at image tokens), pixels and grid (tensors or None),
response (list of ids), rollout (list of log-probs), reward, valid; where they differ from ``valid``, counted (its
reward counts in its group) and trained (its tokens carry loss); with a reference or a teacher, ref and teacher
(log-probs).
Options that are left out are off.
"""

from __future__ import annotations

import math
import statistics

import torch


def logprobs(model, sample, suppressed: list[int], temperature: float) -> list[torch.Tensor]:
    """Log-prob of each response token."""
    if not sample["response"]:
        return []
    ids = torch.tensor([sample["prompt"] + sample["response"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if sample["pixels"] is not None:
        types = torch.tensor([sample["types"] + [0] * len(sample["response"])])
        inputs |= {"pixel_values": sample["pixels"], "image_grid_thw": sample["grid"], "mm_token_type_ids": types}
    model.model.rope_deltas = None
    logits = model(**inputs, use_cache=False).logits[0]
    allowed = torch.ones(logits.shape[-1], dtype=torch.bool)
    allowed[suppressed] = False
    result = []
    for t, token in enumerate(sample["response"]):
        row = logits[len(sample["prompt"]) - 1 + t].float() / temperature
        result.append(row[token] - torch.logsumexp(row[allowed], dim=0))
    return result


def advantages(samples, eps: float, kind: str = "grpo") -> list[float]:
    def peers(sample):
        return [s["reward"] for s in samples if s["group"] == sample["group"] and s.get("counted", s["valid"])]

    def difference(sample) -> float:
        """To the mean of the group: 0 for a group whose rewards are all equal."""
        rewards = peers(sample)
        return sample["reward"] - statistics.mean(rewards) if len(set(rewards)) > 1 else 0.0

    differences = [difference(s) for s in samples if s.get("counted", s["valid"])]
    result = []
    for sample in samples:
        rewards = peers(sample)
        if not sample.get("counted", sample["valid"]) or len(set(rewards)) < 2 or kind == "none":
            result.append(0.0)
        elif kind == "grpo":
            result.append(difference(sample) / (statistics.stdev(rewards) + eps))
        elif kind == "dr_grpo":
            result.append(difference(sample))
        elif kind == "rloo":
            rewards.remove(sample["reward"])
            result.append(sample["reward"] - statistics.mean(rewards))
        elif kind == "reinforce_pp_baseline":
            result.append(difference(sample) / (statistics.stdev(differences) + eps))
    return result


def importance_weights(old, rollout, opts) -> list[float]:
    """One weight for each token of a response."""
    correction = opts.get("correction", "none")
    if correction == "none":
        return [1.0] * len(old)
    gaps = [o - r for o, r in zip(old, rollout, strict=True)]
    if opts.get("level") == "sequence":
        gaps = [sum(gaps)] * len(gaps)
    weights = [math.exp(gap) for gap in gaps]
    if correction == "tis":
        return [min(w, opts["tis_cap"]) for w in weights]
    return [w if opts["mis_low"] <= w <= opts["mis_high"] else 0.0 for w in weights]


def surrogates(new, old, advantage: list[float], opts) -> list[torch.Tensor]:
    """What is maximised at each token of a response, before importance weights.

    GSPO as its token variant (arXiv:2507.18071, section 4.3): sg[s] * pi / sg[pi].
    """
    kind = opts.get("policy_loss", "ppo_clip")
    ratios = [torch.exp(n - o) for n, o in zip(new, old, strict=True)]
    if kind == "gspo":
        s = math.exp(sum(float(n.detach()) - o for n, o in zip(new, old, strict=True)) / len(new))
        ratios = [s * torch.exp(n - n.detach()) for n in new]
    result = []
    for n, ratio, a in zip(new, ratios, advantage, strict=True):
        clipped = torch.clamp(ratio, 1 - opts["clip_low"], 1 + opts["clip_high"])
        result.append(clipped.detach() * a * n if kind == "cispo" else torch.min(ratio * a, clipped * a))
    return result


def kl(new, ref: float, kind: str):
    ratio = math.exp(ref) / torch.exp(new)
    if kind == "k1":
        return -torch.log(ratio)
    return torch.log(ratio) ** 2 / 2 if kind == "k2" else (ratio - 1) - torch.log(ratio)


def token_losses(new, old, sample, advantage: float, opts) -> list[torch.Tensor]:
    """Of one response, its advantage being the same at all tokens but for what a teacher says."""
    per_token = [advantage] * len(new)
    if opts.get("teacher_coef", 0.0):
        per_token = [advantage + opts["teacher_coef"] * (t - o) for t, o in zip(sample["teacher"], old, strict=True)]
    weights = importance_weights(old, sample["rollout"], opts)
    losses = [-w * s for w, s in zip(weights, surrogates(new, old, per_token, opts), strict=True)]
    if opts.get("kl_coef", 0.0):
        losses = [
            loss + opts["kl_coef"] * kl(n, r, opts["kl"]) for loss, n, r in zip(losses, new, sample["ref"], strict=True)
        ]
    return losses


def mean_loss(new, samples, old, advantage, opts) -> torch.Tensor:
    """Mean over response tokens of all trained samples, over samples of the mean over their tokens, or over all samples
    of the sum over their tokens / max_response_tokens. ``new``: a list of log-probs for each sample.
    """
    total, tokens, sequences = torch.zeros(()), 0, 0
    for new_sample, sample, old_sample, a in zip(new, samples, old, advantage, strict=True):
        if not sample.get("trained", sample["valid"]) or not new_sample:
            continue
        losses = token_losses(new_sample, old_sample, sample, a, opts)
        scale = 1.0 / len(losses) if opts["aggregation"] == "sequence_mean" else 1.0
        total = total + scale * sum(losses)
        tokens += len(losses)
        sequences += 1
    if opts["aggregation"] == "constant_length":
        return total / (len(samples) * opts["max_response_tokens"])
    return total / (tokens if opts["aggregation"] == "token_mean" else sequences)


def batch_loss(model, samples, old, advantage, opts) -> torch.Tensor:
    new = [
        logprobs(model, s, opts["suppressed"], opts["temperature"]) if s.get("trained", s["valid"]) else []
        for s in samples
    ]
    return mean_loss(new, samples, old, advantage, opts)


def update(model, samples, old, advantage, state: dict, lr: float, opts) -> tuple[float, float, dict]:
    """One clipped AdamW step (no weight decay), in place; returns loss, gradient norm and the unclipped gradients."""
    model.zero_grad()
    loss = batch_loss(model, samples, old, advantage, opts)
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads.values()))
    scale = min(1.0, opts["grad_clip"] / norm)
    step = state["step"] = state.get("step", 0) + 1
    b1, b2 = opts["betas"]
    with torch.no_grad():
        for name, p in model.named_parameters():
            g = grads[name] * scale
            m = state[name, "m"] = b1 * state.get((name, "m"), 0.0) + (1 - b1) * g
            v = state[name, "v"] = b2 * state.get((name, "v"), 0.0) + (1 - b2) * g * g
            p -= lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + opts["eps"])
    return float(loss.detach()), norm, grads
