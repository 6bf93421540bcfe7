"""Every span and metric that a run may record: its name, its unit, and what it says.

``docs/observability.md`` holds the same tables; a test compares them.
"""

from __future__ import annotations

SPANS: dict[str, str] = {
    "loop.step": "one pass of the loop: claim to publish of one partition",
    "loop.claim": "the controller waits for groups in the data plane: the actor waits for the rollout side",
    "loop.checkpoint": "a checkpoint is written",
    "processor.process": "images, chat template and tokens of one prompt; `wait_s` is its time in the queue",
    "rollout.load_weights": "an engine takes the weights of a policy version",
    "rollout.generate": "one decode batch is generated",
    "rollout.evaluate": "greedy evaluation on a split",
    "reward.score": "the rewards of one prompt group, from request to answer",
    "plane.put": "one prompt group is handed to the data plane",
    "plane.backpressure": "a producer waits because the plane is full",
    "actor.fetch": "payloads are fetched by index",
    "actor.forward": "a forward without gradient; `role` says under which weights",
    "actor.advantages": "advantages over the full batch",
    "actor.train": "forward and backward of one microbatch",
    "actor.optimizer": "reduction, normaliser, clipping, optimizer step",
    "actor.publish": "the new weights leave the actor",
}

METRICS: dict[str, tuple[str, str]] = {
    # which update
    "update": ("", "optimizer updates before this one, counted from 0"),
    "partition": ("", "the rollout batch that was trained"),
    "policy_version": ("", "policy version after this update"),
    "optimizer_step": ("updates", "applied updates so far"),
    "skipped_updates": ("updates", "updates skipped so far: loss or gradient was not finite, or no token had loss"),
    "update_skipped": ("0 or 1", "1: this update was skipped"),
    "nonfinite": ("values", "values of this line that were NaN or infinite, and are null"),
    # samples
    "samples": ("samples", "samples of the partition, failed ones included"),
    "groups": ("groups", "prompt groups with at least one valid sample"),
    "failed_samples": ("samples", "samples whose reward or generation failed"),
    "truncated_samples": ("samples", "responses cut at rollout.max_response_tokens"),
    "zero_signal_groups": ("groups", "groups in which all rewards are equal, so that every advantage is 0"),
    "reward_mean": ("reward", "mean over valid samples"),
    "prompt_tokens": ("tokens", "prompt tokens over all samples, without padding"),
    "response_tokens": ("tokens", "response tokens over all samples"),
    "tokens": ("tokens", "prompt_tokens + response_tokens"),
    "images": ("images", "images of all prompt groups, each counted once"),
    "patches": ("patches", "image patches of all prompt groups, each counted once"),
    "staleness_mean": ("versions", "partition minus the start version of its samples, mean"),
    "staleness_max": ("versions", "the same, maximum"),
    # the update
    "loss": ("", "the normalised loss"),
    "loss_tokens": ("tokens", "response tokens that carry loss"),
    "lr": ("", "learning rate of this update"),
    "grad_norm": ("", "gradient norm before clipping"),
    "entropy": ("nats", "entropy of the policy, mean over loss tokens"),
    "ratio_mean": ("", "PPO ratio, mean over loss tokens"),
    "ratio_deviation_max": ("", "largest |ratio - 1|; 0 in a one-mini, one-epoch run that is exact"),
    "clip_low_fraction": ("share", "loss tokens clipped below"),
    "clip_high_fraction": ("share", "loss tokens clipped above"),
    "ppo_kl_k1": ("nats", "KL(old || new) by the k1 estimator, mean over loss tokens"),
    "ppo_kl_k3": ("nats", "the same by k3"),
    "rollout_kl_k1": ("nats", "KL(rollout || old) by the k1 estimator, mean over loss tokens"),
    "rollout_kl_k3": ("nats", "the same by k3"),
    "rollout_gap_max": ("nats", "largest |old - rollout| log-prob"),
    "is_weight_mean": ("", "truncated importance weight, mean over loss tokens"),
    "is_weight_max": ("", "the same, maximum"),
    "is_clipped_fraction": ("share", "loss tokens whose importance weight was truncated"),
    "is_effective_sample_share": ("share", "Kish's effective sample size over loss tokens"),
    # layout and time
    "microbatches": ("microbatches", "forwards of one rank in phase 3"),
    "fill": ("share", "real tokens over laid-out tokens"),
    "step_s": ("s", "wall time of the loop's step"),
    "tokens_per_s": ("tokens/s", "tokens / step_s"),
    "response_tokens_per_s": ("tokens/s", "response_tokens / step_s"),
    "samples_per_s": ("samples/s", "samples / step_s"),
    "actor_wait_s": ("s", "the controller waited for groups (loop.claim)"),
    "rollout_wait_s": ("s", "no rollout span ran: the rollout side waited for weights, room, prompts or rewards"),
    "fetched_bytes": ("bytes", "payload bytes that the actor fetched"),
    "memory_rss_bytes": ("bytes", "resident memory of all processes of the run; shared pages count once for each"),
    # evaluation
    "eval_exact_match": ("share", "greedy exact match on the validation split, on updates that evaluate"),
    "eval_prompts": ("prompts", "prompts of that evaluation"),
}
