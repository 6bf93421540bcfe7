"""GRPO in plain PyTorch, one file, one sample at a time, written from the papers for comparison with the engine.

Nothing here comes from the engine: the model is called as transformers documents it, log-probs, advantages, importance
weights, clipping, aggregation, gradient clipping and AdamW are spelled out per sample and per token.

A sample is a dict: group, prompt (list of ids), types (list, 1 at image tokens), pixels and grid (tensors or None),
response (list of ids), rollout (list of log-probs), reward, valid.
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


def advantages(samples, eps: float) -> list[float]:
    result = []
    for sample in samples:
        rewards = [s["reward"] for s in samples if s["group"] == sample["group"] and s["valid"]]
        if not sample["valid"] or len(set(rewards)) < 2:
            result.append(0.0)
        else:
            result.append((sample["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + eps))
    return result


def token_loss(new, old: float, rollout: float, advantage: float, opts) -> torch.Tensor:
    ratio = torch.exp(new - old)
    clipped = torch.clamp(ratio, 1 - opts["clip_low"], 1 + opts["clip_high"])
    weight = min(math.exp(old - rollout), opts["tis_cap"]) if opts["tis"] else 1.0
    return -weight * torch.min(ratio * advantage, clipped * advantage)


def batch_loss(model, samples, old, advantage, opts) -> torch.Tensor:
    """Mean over response tokens of all valid samples, or over samples of the mean over their tokens."""
    total, tokens, sequences = torch.zeros(()), 0, 0
    for sample, old_sample, a in zip(samples, old, advantage, strict=True):
        if not sample["valid"] or not sample["response"]:
            continue
        new = logprobs(model, sample, opts["suppressed"], opts["temperature"])
        losses = [token_loss(n, o, r, a, opts) for n, o, r in zip(new, old_sample, sample["rollout"], strict=True)]
        scale = 1.0 if opts["aggregation"] == "token_mean" else 1.0 / len(losses)
        total = total + scale * sum(losses)
        tokens += len(losses)
        sequences += 1
    return total / (tokens if opts["aggregation"] == "token_mean" else sequences)


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
