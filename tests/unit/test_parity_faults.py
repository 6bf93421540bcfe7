"""Every row of the table has a fault that it finds and names, planted in a real actor's work on update 1 of 2.

Responses are 3-5-4, 6-0-2, 1-4-7 and 5-2-3 tokens long: sample 4 is empty, 7 failed; images of groups 0 and 3 have one
size.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import parity_case
import pytest
import torch
from parity_case import Work, flip_bit, nudge, tuples

from stretto.parity import table
from stretto.parity.compare import compare
from stretto.parity.quantities import QUANTITIES
from stretto.parity.verdict import Row, Verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return parity_case.write_run(tmp_path_factory.mktemp("parity") / "a")


def faulty(run: Path, tmp_path: Path, place: str, fault: parity_case.Fault) -> Verdict:
    return compare(run, parity_case.write_run(tmp_path / "b", faults={place: fault}))


def named(verdict: Verdict, quantity: str, **where: Any) -> Row:
    """The row is that of the first divergence, says ``where``, and its line can be read."""
    row = verdict.first
    assert row is not None and row.quantity == quantity, table.text(verdict)
    assert row.status == "differs" and verdict.exit_code == 1
    assert row.first is not None
    found = {name: getattr(row.first, name) for name in where}
    assert found == where
    assert row.first.update == 1
    line = table.explain(row)
    assert line in table.summary(verdict) and f"update {row.first.update}" in line
    for name, word in (("sample", "sample {}"), ("token", "token {}"), ("parameter", "tensor {}")):
        if where.get(name) is not None:
            assert word.format(where[name]) in line
    return row


def exact(verdict: Verdict, *quantities: str) -> None:
    assert {name: verdict[name].status for name in quantities} == dict.fromkeys(quantities, "exact")


def test_equal_runs_pass_in_every_row(run, tmp_path):
    verdict = compare(run, parity_case.write_run(tmp_path / "b"), control=parity_case.write_run(tmp_path / "c"))
    assert [row.status for row in verdict.rows] == ["exact"] * len(QUANTITIES)
    assert verdict.first is None and verdict.exit_code == 0
    assert all(row.distance.compared > 0 and row.distance.differing == 0 for row in verdict.rows)
    assert verdict["response tokens"].distance.compared == 2 * 42
    assert verdict["rewards"].distance.compared == 2 * 12


# Inputs ------------------------------------------------------------------------------------------------------------


def test_two_swapped_images_of_equal_size(run, tmp_path):
    def swap(work: Work) -> None:
        a, b = work.payloads[0], work.payloads[3]
        assert a["pixel_values"].shape == b["pixel_values"].shape
        a["pixel_values"], b["pixel_values"] = b["pixel_values"], a["pixel_values"]

    verdict = faulty(run, tmp_path, "inputs", swap)
    row = named(verdict, "multimodal tensors", sample=0, group=0, phase="inputs", token=None)
    assert row.distance.differing == 6  # three samples of each group
    exact(verdict, "prompt tokens", "response tokens", "rewards", "advantages", "microbatch schedule")
    assert verdict["parameters"].status == "differs"


def test_one_pixel(run, tmp_path):
    def change(work: Work) -> None:
        pixels = work.payloads[2]["pixel_values"].copy()
        flip_bit(pixels, 777)
        work.payloads[2]["pixel_values"] = pixels

    assert (
        named(faulty(run, tmp_path, "inputs", change), "multimodal tensors", sample=6, group=2).distance.differing == 3
    )


def test_a_prompt_token(run, tmp_path):
    def change(work: Work) -> None:
        ids = work.payloads[1]["prompt_ids"].copy()
        ids[-1] += 1
        work.payloads[1]["prompt_ids"] = ids

    verdict = faulty(run, tmp_path, "inputs", change)
    named(verdict, "prompt tokens", sample=3, group=1)
    exact(verdict, "multimodal tensors")


def test_a_response_token(run, tmp_path):
    ids = []

    def change(work: Work) -> None:
        response = work.payloads[2]["response_ids"][2]
        ids.extend([int(response[4]), int(response[4]) - 1])
        response[4] -= 1

    verdict = faulty(run, tmp_path, "inputs", change)
    row = named(verdict, "response tokens", sample=8, group=2, token=4)
    assert [row.first.a, row.first.b] == ids and row.distance.differing == 1
    exact(verdict, "response lengths", "rollout log-probs", "loss masks")


def test_a_dropped_token(run, tmp_path):
    def drop(work: Work) -> None:
        for name in ("response_ids", "rollout_logprobs"):
            work.payloads[0][name][1] = work.payloads[0][name][1][:-1]
        work.change(0, response_tokens=tuples(work.records[0].response_tokens, 1, 4))

    verdict = faulty(run, tmp_path, "inputs", drop)
    named(verdict, "response tokens", sample=1, group=0, token=4, b=None)
    lengths = verdict["response lengths"].first
    assert (lengths.sample, lengths.a, lengths.b, lengths.magnitude) == (1, 5, 4, 1.0)
    assert verdict["response lengths"].distance.differing == 1
    assert verdict["loss masks"].first.token == 4 and verdict["loss masks"].distance.differing == 1


def test_a_reward_off_by_a_millionth(run, tmp_path):
    def change(work: Work) -> None:
        work.change(2, rewards=tuples(work.records[2].rewards, 2, 0.25 + 1e-6))

    row = named(faulty(run, tmp_path, "inputs", change), "raw rewards", sample=8, group=2, a=0.25, b=0.250001)
    assert row.first.magnitude == pytest.approx(1e-6) and row.distance.largest == pytest.approx(1e-6)
    assert "max abs 1e-06" in table.explain(row)


def test_a_sample_that_failed_in_one_run_alone(run, tmp_path):
    verdict = faulty(
        run, tmp_path, "inputs", lambda work: work.change(0, valid=tuples(work.records[0].valid, 1, False))
    )
    named(verdict, "failed samples", sample=1, a=True, b=False)
    exact(verdict, "raw rewards", "rewards")


def test_a_truncated_response_that_is_not_marked(run, tmp_path):
    verdict = faulty(
        run, tmp_path, "inputs", lambda work: work.change(3, truncated=tuples((False,) * 3, 0, True))
    )  # fmt: skip
    named(verdict, "truncation", sample=9, a=False, b=True)


def test_a_stale_version_stamp(run, tmp_path):
    verdict = faulty(run, tmp_path, "inputs", lambda work: work.change(1, version_end=(0, 0, 1)))
    named(verdict, "policy versions", sample=5, a="version start 0, version end 0", b="version start 0, version end 1")


def test_the_last_bit_of_a_rollout_log_prob(run, tmp_path):
    verdict = faulty(run, tmp_path, "inputs", lambda work: nudge(work.payloads[3]["rollout_logprobs"][1], 1))
    row = named(verdict, "rollout log-probs", sample=10, token=1)
    assert 0 < row.first.magnitude < 1e-6 and row.distance.largest == row.first.magnitude


# Phase 1 -----------------------------------------------------------------------------------------------------------


def test_an_off_by_one_in_the_schedule(run, tmp_path):
    """The last sample of a microbatch moves to the next one."""

    def shift(work: Work) -> None:
        (mini,) = work.minis
        chunk = mini.chunks[0]
        first, second, *rest = chunk.ranks[0]
        moved = (
            dataclasses.replace(first, samples=first.samples[:-1]),
            dataclasses.replace(second, samples=(first.samples[-1], *second.samples)),
            *rest,
        )
        chunks = (dataclasses.replace(chunk, ranks=(moved,)), *mini.chunks[1:])
        work.minis = [dataclasses.replace(mini, chunks=chunks)]

    verdict = faulty(run, tmp_path, "schedule", shift)
    row = verdict.first
    assert row.quantity == "microbatch schedule" and row.first.phase == "phase 1" and row.first.update == 1
    a, b = row.first.a, row.first.b
    assert a.startswith("chunk 0, rank 0, microbatch 0") and b == "chunk 0, rank 0, microbatch 1, row 0"
    assert a in table.explain(row) and b in table.explain(row)
    exact(verdict, "response tokens", "rewards", "advantages", "loss masks")


def test_inert_microbatches_count_as_schedule(run, tmp_path):
    """They are no sample's place; the fingerprint tells."""
    other = parity_case.copy(run, tmp_path / "b")
    parity_case.edit_line(other, "fingerprints.jsonl", 1, lambda line: line.update(schedule="f" * 16))
    row = named(compare(run, other), "microbatch schedule", sample=None, b="f" * 16)
    assert "fingerprint schedule" in table.explain(row)


def test_a_stale_weight_in_the_old_policy(run, tmp_path):
    """One tensor of the actor is that of the version before while phase 1 runs."""
    name = "model.language_model.layers.0.mlp.up_proj.weight"

    def stale(work: Work) -> None:
        parameter = dict(work.actor.model.named_parameters())[name]
        current = parameter.detach().clone()
        with torch.no_grad():
            parameter.sub_(1e-3)  # one step of this learning rate back
        (mini,) = work.minis
        for chunk in mini.chunks:
            work.actor.phase1(chunk, [work.records[g] for g in chunk.groups], None)
        work.actor.samples.owned.clear()
        kept = work.actor.old_policy.prepare
        work.actor.old_policy.prepare = lambda *args, **kwargs: None

        def restore() -> None:
            with torch.no_grad():
                parameter.copy_(current)
            work.actor.old_policy.prepare = kept

        work.restore = restore

    verdict = compare(
        run,
        parity_case.write_run(tmp_path / "b", faults={"schedule": stale, "phase 1": lambda work: work.restore()}),
    )
    row = named(verdict, "old-policy log-probs", phase="phase 1", sample=0, token=0)
    assert row.first.magnitude > 0 and row.first.place == "chunk 0, rank 0, microbatch 0, row 0"
    exact(verdict, "microbatch schedule", "rollout log-probs", "training log-probs", "advantages")


# Phase 2 -----------------------------------------------------------------------------------------------------------


def test_a_reward_that_is_judged_otherwise(run, tmp_path):
    def change(work: Work) -> None:
        work.actor.samples.rewards[5] += 1e-6

    verdict = faulty(run, tmp_path, "phase 2", change)
    row = named(verdict, "rewards", sample=5, a=0.5)
    assert row.first.magnitude == pytest.approx(1e-6)
    exact(verdict, *(quantity.name for quantity in QUANTITIES if quantity.name != "rewards"))


def test_an_advantage(run, tmp_path):
    def change(work: Work) -> None:
        advantages = work.actor.samples.advantages
        advantages[6] = float(np.nextafter(np.float32(advantages[6]), np.float32(np.inf)))

    verdict = faulty(run, tmp_path, "phase 2", change)
    row = named(verdict, "advantages", sample=6, group=2)
    assert 0 < row.first.magnitude < 1e-6
    assert verdict["gradients"].status == "differs"


# Phase 3 -----------------------------------------------------------------------------------------------------------


def test_a_shifted_mask(run, tmp_path):
    """The failed sample is trained, and its neighbour is not."""

    def shift(work: Work) -> None:
        samples = work.actor.samples._samples
        assert not samples[7].trained and samples[8].trained
        samples[7], samples[8] = (dataclasses.replace(samples[i], trained=i == 7) for i in (7, 8))

    verdict = faulty(run, tmp_path, "phase 2", shift)
    row = named(verdict, "loss masks", sample=7, token=0, a=0, b=1, phase="phase 3")
    assert row.distance.differing == 4 + 7
    exact(verdict, "failed samples", "advantages", "old-policy log-probs")


def test_a_stale_weight_in_training(run, tmp_path):
    name = "model.language_model.layers.1.mlp.up_proj.weight"

    def stale(work: Work) -> None:
        with torch.no_grad():
            dict(work.actor.model.named_parameters())[name].sub_(1e-3)

    verdict = faulty(run, tmp_path, "phase 2", stale)
    row = named(verdict, "training log-probs", sample=0, token=0)
    assert row.distance.differing > 30
    exact(verdict, "old-policy log-probs", "loss masks")


def test_the_last_bit_of_the_loss(run, tmp_path):
    def change(line: dict[str, float]) -> None:
        line["loss"] = float(np.nextafter(line["loss"], np.inf))

    verdict = compare(run, parity_case.write_run(tmp_path / "b", metrics=change))
    row = named(verdict, "loss", phase="phase 3", sample=None)
    assert row.first.magnitude == abs(row.first.a - row.first.b) > 0
    exact(verdict, *(quantity.name for quantity in QUANTITIES if quantity.name != "loss"))


def test_the_gradient_norm_is_measured_symmetrically(run, tmp_path):
    def change(line: dict[str, float]) -> None:
        line["grad_norm"] *= 3

    verdict = compare(run, parity_case.write_run(tmp_path / "b", metrics=change))
    row = named(verdict, "gradient norm")
    assert row.first.magnitude == pytest.approx(1.0)  # 2 (3 - 1) / (3 + 1)
    exact(verdict, "loss", "gradients")


@pytest.mark.parametrize(
    ("quantity", "tensors"),
    [
        ("gradients", lambda actor: actor.trainer.master.named_grads()),
        ("parameters", lambda actor: actor.trainer.master.named()),
    ],
)
def test_one_bit_of_a_gradient_or_parameter(run, tmp_path, quantity, tensors):
    name = "model.visual.merger.norm.weight"
    verdict = faulty(run, tmp_path, "phase 3", lambda work: flip_bit(tensors(work.actor)[name].numpy(), 3))
    row = named(verdict, quantity, parameter=name)
    assert row.distance.differing == 1 and row.distance.compared > 100
    exact(verdict, *(q.name for q in QUANTITIES if q.name != quantity))


def test_one_bit_of_the_optimizer(run, tmp_path):
    def change(work: Work) -> None:
        state = work.actor.trainer.optimizer_tensors()
        name = next(name for name in state if name.startswith("model.visual.merger.norm.weight") and "sq" in name)
        flip_bit(state[name].numpy(), 3)

    verdict = faulty(run, tmp_path, "phase 3", change)
    row = named(verdict, "optimizer state")
    assert row.first.parameter.startswith("model.visual.merger.norm.weight")
    exact(verdict, "parameters", "gradients")


def test_a_parameter_that_is_left_behind_moves_what_comes_after(run, tmp_path):
    """Planted at the end of update 0: the first divergence is there, not where it shows."""
    name = "model.language_model.norm.weight"
    fault = {"phase 3": lambda work: work.actor.trainer.master.named()[name].sub_(1e-3)}
    verdict = compare(run, parity_case.write_run(tmp_path / "b", faults=fault, at=0))
    row = verdict.first
    assert (row.quantity, row.first.update, row.first.parameter) == ("parameters", 0, name)
    assert verdict["old-policy log-probs"].first.update == 1


# What is printed ---------------------------------------------------------------------------------------------------


def test_what_is_printed_and_written_names_the_fault(run, tmp_path):
    def not_a_number(work: Work) -> None:
        work.change(2, rewards=tuples(work.records[2].rewards, 1, np.nan))  # of the failed sample

    verdict = faulty(run, tmp_path, "inputs", not_a_number)
    text = table.text(verdict)
    assert text.startswith("failed: of 20 rows ")
    assert "raw rewards: update 1, inputs, sample 7 (group 2), chunk 1, rank 0" in text
    assert "0.0 against nan" in text
    long = [line for line in text.splitlines() if len(line) > table.WIDTH and str(tmp_path) not in line]
    assert not long
    table.write(verdict, tmp_path / "out")
    plain = json.loads((tmp_path / "out/parity.json").read_text(), parse_constant=pytest.fail)
    assert plain["first"] == "raw rewards" and plain["exit_code"] == 1
    found = next(row for row in plain["rows"] if row["quantity"] == "raw rewards")
    assert found["first"]["b"] == "nan" and found["distance"]["largest"] == "inf"
    markdown = (tmp_path / "out/parity.md").read_text()
    assert markdown.count("\n| ") == 1 + len(QUANTITIES) and table.explain(verdict["raw rewards"]) in markdown
