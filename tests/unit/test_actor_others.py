"""Log-probs of policies beside the actor's: the reference, a teacher, a snapshot, the rollout engine's own."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import actor_case
import numpy as np
import pytest
import tiny
import torch

from stretto.actor.advantage import estimator
from stretto.actor.checkpoint import latest_valid
from stretto.actor.forward import forward_logprobs
from stretto.actor.hook import load_hook
from stretto.actor.old_policy import DedicatedForward, RolloutLogprobs
from stretto.actor.rank import ActorRankCore
from stretto.actor.teacher import HostedModel
from stretto.types import ConfigError, StrettoError

FAST = {"lr": 0.05, "warmup_updates": 0, "eps": 1e-3, "grad_clip": 1e9}
SNAPSHOT = partial(DedicatedForward, tag="old_actor")


def run(actor: ActorRankCore, k: int, payloads: dict[int, Any]) -> dict[str, float]:
    """Partition ``k`` from end to end, its samples kept."""
    records, fields = actor_case.partition(k)
    payloads.update(fields)
    (metrics,) = actor_case.run_step(actor, records)
    return metrics


def logprobs(model: torch.nn.Module, actor: ActorRankCore, index: int) -> torch.Tensor:
    """Of one sample under another model, in the batch that the actor forwards it in."""
    records = list(actor.samples.records.values())
    (mini,) = actor_case.minis(actor.config, records)
    (microbatch,) = [m for m in mini.microbatches(0) if index in m.samples and not m.inert]
    batch = actor._collate(actor.family, microbatch.samples)
    with torch.no_grad():
        all_T, _ = forward_logprobs(actor.family, model, batch, actor.config.rollout.temperature)
    return all_T.split(list(batch.lengths))[microbatch.samples.index(index)]


@pytest.mark.parametrize("where", ["kl_loss_coef", "kl_reward_coef"])
def test_the_reference_is_the_policy_that_the_run_began_with(where):
    cfg = actor_case.config(algorithm={where: 0.1}, actor=FAST)
    payloads: dict[int, Any] = {}
    actor = actor_case.core(cfg, payloads)
    for k in range(2):
        run(actor, k, payloads)
        for index in sorted(actor.samples.owned):
            kept = actor.reference.forward.kept(index)
            assert torch.equal(kept, logprobs(tiny.model(), actor, index))
        if k == 0:
            actor.end_partition()
    # The actor itself has moved on, and phase 1 used it as it was after one update.
    old = np.concatenate([actor.samples.old[i] for i in sorted(actor.samples.owned)])
    reference = torch.cat([actor.reference.forward.kept(i) for i in sorted(actor.samples.owned)])
    assert np.abs(old - reference.numpy()).max() > 0.1


def test_computing_the_reference_leaves_the_old_policy_as_it_was():
    outcomes = []
    for coef in (0.0, 1e-30):
        cfg = actor_case.config(algorithm={"kl_loss_coef": coef}, actor=FAST)
        payloads: dict[int, Any] = {}
        actor = actor_case.core(cfg, payloads)
        run(actor, 0, payloads)
        actor.end_partition()
        run(actor, 1, payloads)
        outcomes.append(actor_case.fingerprints(actor)["inputs.rollout_logprobs"])
        outcomes.append({i: v.tobytes() for i, v in actor.samples.old.items()})
    assert outcomes[:2] == outcomes[2:]


def test_kl_in_the_reward_is_the_sum_over_the_response_of_old_less_reference():
    coef = 0.3
    cfg = actor_case.config(algorithm={"kl_reward_coef": coef}, actor=FAST)
    payloads: dict[int, Any] = {}
    actor = actor_case.core(cfg, payloads)
    first = run(actor, 0, payloads)
    assert first["reward_kl_mean"] == 0.0  # it still is the reference
    actor.end_partition()
    second = run(actor, 1, payloads)
    records, _ = actor_case.partition(1)
    expected_kl, rewards, groups, valid = [], [], [], []
    for record in records:
        for i, index in enumerate(record.global_indexes):
            old, ref = logprobs_pair(actor, index)
            expected_kl.append(float((old.double() - ref.double()).sum()))
            rewards.append(record.rewards[i] - coef * expected_kl[-1])
            groups.append(record.group)
            valid.append(record.valid[i])
    wanted = estimator(cfg.algorithm)(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid), torch.tensor(groups)
    ).advantages_B
    evidence = actor.samples.raw()
    assert evidence["rewards"] == pytest.approx(rewards, abs=1e-5)
    assert evidence["raw_rewards"].tolist() == [r for record in records for r in record.rewards]
    found = [actor.samples.advantages[i] for i in sorted(actor.samples.advantages)]
    assert found == pytest.approx(wanted.tolist(), abs=1e-5)
    assert max(abs(kl) for kl in expected_kl) > 0.1
    kept = [kl for kl, v in zip(expected_kl, valid, strict=True) if v]
    assert second["reward_kl_mean"] == pytest.approx(sum(kept) / len(kept), abs=1e-6)
    raw = [r for record in records for r, v in zip(record.rewards, record.valid, strict=True) if v]
    assert second["reward_mean"] == pytest.approx(sum(raw) / len(raw))  # as the reward function gave it


def logprobs_pair(actor: ActorRankCore, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return actor.old_policy.known(index), logprobs(tiny.model(), actor, index)


def test_kl_in_the_reward_without_the_actors_log_probs_is_an_error():
    cfg = actor_case.config(algorithm={"kl_reward_coef": 0.3})
    records, payloads = actor_case.partition()
    for source in (RolloutLogprobs, SNAPSHOT):
        actor = actor_case.core(cfg, payloads, old_policy=source)
        with pytest.raises(StrettoError, match=r"sample 0: algorithm\.kl_reward_coef needs the actor's own log-probs"):
            actor_case.run_step(actor, records)


def test_a_teacher_forwards_with_its_own_weights_and_family():
    cfg = actor_case.config(algorithm={"teacher": "not loaded here"}, actor=FAST)
    payloads: dict[int, Any] = {}
    hosted = HostedModel(tiny.model(1), torch.device("cpu"))
    actor = actor_case.core(cfg, payloads, teacher=(tiny.family(), hosted))
    metrics = run(actor, 0, payloads)
    for index in sorted(actor.samples.owned):
        assert torch.equal(actor.teacher.forward.kept(index), logprobs(tiny.model(1), actor, index))
    assert metrics["teacher_kl"] != 0
    for name, parameter in tiny.model(1).named_parameters():
        assert torch.equal(dict(hosted.model.named_parameters())[name], parameter), name


def test_a_teacher_alone_pulls_the_student_towards_itself():
    cfg = actor_case.config(
        algorithm={"teacher": "not loaded here", "advantage": "none"}, actor=FAST | {"lr": 2e-3}, staleness=0
    )
    payloads: dict[int, Any] = {}
    hosted = HostedModel(tiny.model(1), torch.device("cpu"))
    actor = actor_case.core(cfg, payloads, teacher=(tiny.family(), hosted))
    gaps = []
    for _ in range(30):
        run(actor, 0, payloads)
        # How far the student's log-probs of tokens that the teacher likes better are below the teacher's.
        old = torch.cat([actor.old_policy.known(i) for i in sorted(actor.samples.owned)])
        teacher = torch.cat([actor.teacher.forward.kept(i) for i in sorted(actor.samples.owned)])
        gaps.append(float((teacher - old).clamp(min=0).mean()))
        actor.end_partition()
    assert gaps[-1] < 0.6 * gaps[0]


def test_a_snapshot_is_renewed_every_so_many_partitions():
    cfg = actor_case.config(algorithm={"old_policy": "old_actor", "old_actor_every": 2}, actor=FAST)
    payloads: dict[int, Any] = {}
    actor = actor_case.core(cfg, payloads, old_policy=SNAPSHOT)
    weights = []
    for k in range(4):
        weights.append({name: p.detach().clone() for name, p in actor.model.named_parameters()})
        run(actor, k, payloads)
        snapshot = tiny.model()
        snapshot.load_state_dict(weights[k - k % 2], strict=False)
        for index in sorted(actor.samples.owned):
            expected = logprobs(snapshot, actor, index)
            assert np.array_equal(actor.samples.old[index], expected.numpy())
        actor.end_partition()


def test_a_run_goes_on_with_the_snapshot_that_it_had(tmp_path):
    cfg = actor_case.config(
        algorithm={"old_policy": "old_actor", "old_actor_every": 3}, actor=FAST, run_dir=str(tmp_path)
    )
    straight_payloads: dict[int, Any] = {}
    straight = actor_case.core(cfg, straight_payloads, old_policy=SNAPSHOT)
    for k in range(5):
        run(straight, k, straight_payloads)
        expected = actor_case.fingerprints(straight)
        straight.end_partition()
        if k == 1:
            path = actor_case.save(straight, 2)
    resumed_payloads: dict[int, Any] = {}
    resumed = actor_case.core(cfg, resumed_payloads, old_policy=SNAPSHOT)
    resumed.saving.load(path, latest_valid(tmp_path / "checkpoints").state)
    for k in range(2, 5):
        run(resumed, k, resumed_payloads)
        found = actor_case.fingerprints(resumed)
        resumed.end_partition()
    assert found == expected


def test_the_rollouts_log_probs_are_used_without_any_forward(monkeypatch):
    cfg = actor_case.config(algorithm={"old_policy": "rollout"})
    records, payloads = actor_case.partition()
    actor = actor_case.core(cfg, payloads, old_policy=RolloutLogprobs)
    roles = []
    span = actor.tracer.span
    monkeypatch.setattr(actor.tracer, "span", lambda name, **attrs: (roles.append(name), span(name, **attrs))[1])
    actor_case.run_step(actor, records)
    assert "actor.forward" not in roles and "actor.train" in roles
    for record in records:
        for i, index in enumerate(record.global_indexes):
            assert np.array_equal(actor.samples.old[index], payloads[record.group]["rollout_logprobs"][i])


def test_a_run_refuses_to_go_on_with_another_reference_or_teacher(tmp_path):
    cfg = actor_case.config(algorithm={"kl_loss_coef": 0.1, "teacher": "kept/teacher"}, run_dir=str(tmp_path))
    payloads: dict[int, Any] = {}

    def made(seed: int, teacher: int) -> ActorRankCore:
        hosted = HostedModel(tiny.model(teacher), torch.device("cpu"))
        return actor_case.core(cfg, payloads, seed, teacher=(tiny.family(), hosted))

    actor = made(0, 1)
    run(actor, 0, payloads)
    path = actor_case.save(actor, 1)
    state = latest_valid(tmp_path / "checkpoints").state
    made(0, 1).saving.load(path, state)
    with pytest.raises(StrettoError, match=r"the reference policy had the fingerprint .* model\.path names now has"):
        made(2, 1).saving.load(path, state)
    with pytest.raises(StrettoError, match=r"the teacher policy had the fingerprint .* algorithm\.teacher names now"):
        made(0, 2).saving.load(path, state)


def test_what_a_hook_raises_names_it_and_the_partition(tmp_path, monkeypatch):
    (tmp_path / "bad_hooks.py").write_text(
        "def boom(*, model, partition, rank): raise ValueError('no such mode')\ndef other(model): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    records, payloads = actor_case.partition()
    actor = actor_case.core(actor_case.config(), payloads, hook=load_hook("bad_hooks:boom"))
    with pytest.raises(StrettoError, match=r"bad_hooks:boom' raised ValueError: no such mode, for partition 0"):
        actor_case.run_step(actor, records)
    with pytest.raises(ConfigError, match="cannot be called as function"):
        load_hook("bad_hooks:other")


def test_the_hook_is_called_once_a_partition_before_any_forward():
    calls: list[tuple[int, int, int]] = []
    payloads: dict[int, Any] = {}
    cfg = actor_case.config()

    def hook(*, model, partition, rank):
        assert model is actor.model
        calls.append((partition, rank, len(actor.samples.owned)))

    actor = actor_case.core(cfg, payloads, hook=hook)
    for k in range(3):
        run(actor, k, payloads)
        actor.end_partition()
    assert calls == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


def test_a_hook_is_found_by_its_name_or_refused(tmp_path, monkeypatch):
    (tmp_path / "my_hooks.py").write_text("def before(*, model, partition, rank): ...\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_hook("") is None
    assert load_hook("my_hooks:before").__name__ == "before"
    for name, why in (
        ("no_such:f", "No module named 'no_such'"),
        ("my_hooks:after", "after"),
        ("my_hooks:NUMBER", "int"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_hook(name)


@pytest.mark.parametrize("policy", ["train", "mask", "drop"])
def test_truncated_responses_by_policy(policy):
    """The first response of group 0 (3 tokens, reward 1, the only one) was cut by length."""
    cfg = actor_case.config(
        algorithm={"truncated": policy}, rollout={"prompts_per_partition": 1}, actor={"chunks_per_mini": 1}
    )
    records, payloads = actor_case.partition()
    record = dataclasses.replace(records[0], truncated=(True, False, False), response_tokens=(3, 5, 4))
    actor = actor_case.core(cfg, payloads)
    (metrics,) = actor_case.run_step(actor, [record], groups_per_mini=1)
    total = sum(actor_case.RESPONSES[0])
    assert metrics["loss_tokens"] == (total if policy == "train" else total - 3)
    std = np.std([1.0, 0.0, 0.0], ddof=1)
    expected = [(r - 1 / 3) / (std + 1e-4) for r in (1.0, 0.0, 0.0)] if policy != "drop" else [0.0, 0.0, 0.0]
    assert [actor.samples.advantages[i] for i in range(3)] == pytest.approx(expected, abs=1e-6)
