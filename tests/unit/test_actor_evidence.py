"""What a rank writes down of its samples: where each was trained, under which mask, and from which inputs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import actor_case
import numpy as np
import pytest
import tiny
import torch

from stretto import controller
from stretto.actor.evidence import merged
from stretto.actor.others import fingerprint_of
from stretto.observe.dump import dump_path, read_dump, write_dump
from stretto.observe.fingerprint import combine, tensor_sums
from stretto.types import StrettoError

LENGTHS = [3, 5, 4, 6, 0, 2, 1, 4, 7, 5, 2, 3]
"""Of ``actor_case.RESPONSES``."""


def trained(cfg=None, payloads=None, records=None, step=actor_case.run_step):
    made = actor_case.partition()
    actor = actor_case.core(cfg or actor_case.config(), payloads or made[1])
    step(actor, records or made[0])
    return actor


def changed(before, after):
    """Rows of each column that differ."""
    assert before.keys() == after.keys()
    found = {name: np.flatnonzero(before[name] != after[name]).tolist() for name in before}
    return {name: rows for name, rows in found.items() if rows}


# Where and under which mask ------------------------------------------------------------------------------------------


def test_places_are_those_of_the_schedule_and_name_every_sample_once():
    """Budgets of 64 tokens: groups 0 and 1 are the first chunk."""
    actor = trained()
    raw = actor.samples.raw()
    (mini,) = actor_case.minis(actor.config, actor_case.partition()[0])
    for index, chunk, microbatch, row in zip(
        raw["global_index"], raw["chunk"], raw["microbatch"], raw["row"], strict=True
    ):
        assert mini.chunks[chunk].ranks[0][microbatch].samples[row] == index
    assert raw["chunk"].tolist() == [0] * 6 + [1] * 6
    assert raw["row"][0] == 0 and raw["row"].max() > 0 and raw["microbatch"].max() > 0
    assert not raw["rank"].any()


def test_chunks_of_several_minis_are_counted_through():
    cfg = actor_case.config(actor={"minis_per_partition": 2, "chunks_per_mini": 2})
    actor = trained(cfg, step=lambda actor, records: actor_case.run_step(actor, records, groups_per_mini=2))
    assert actor.samples.raw()["chunk"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_two_microbatches_that_change_places_are_seen():
    def swapped(actor, records):
        (mini,) = actor_case.minis(actor.config, records)
        first, *others = mini.chunks
        a, b, *rest = first.ranks[0]
        chunks = (dataclasses.replace(first, ranks=((b, a, *rest),)), *others)
        for chunk in chunks:
            actor.phase1(chunk, [records[g] for g in chunk.groups], None)
        actor.phase2(records)
        actor.phase3(dataclasses.replace(mini, chunks=chunks), sum(LENGTHS) - LENGTHS[7])

    before, after = trained().samples.raw(), trained(step=swapped).samples.raw()
    differ = changed(before, after)
    assert set(differ) == {"microbatch"}
    assert {before["microbatch"][row] for row in differ["microbatch"]} == {0, 1}


@pytest.mark.parametrize(("truncated", "without"), [("train", {7}), ("mask", {1, 7, 9}), ("drop", {1, 7, 9})])
def test_the_mask_is_0_for_failed_samples_and_for_truncated_ones_where_they_are_left_out(truncated, without):
    records, payloads = actor_case.partition()
    records[0] = dataclasses.replace(records[0], truncated=(False, True, False))
    records[3] = dataclasses.replace(records[3], truncated=(True, False, False))
    actor = trained(actor_case.config(algorithm={"truncated": truncated}), payloads, records)
    raw = actor.samples.raw()
    expected = np.concatenate([np.full(n, i not in without, np.uint8) for i, n in enumerate(LENGTHS)])
    assert raw["loss_mask"].dtype == np.uint8
    np.testing.assert_array_equal(raw["loss_mask"], expected)
    assert np.flatnonzero(raw["truncated"]).tolist() == [1, 9]
    assert (
        raw["rewards"].tolist() == raw["raw_rewards"].tolist() == [r for rewards in actor_case.REWARDS for r in rewards]
    )


def test_the_mask_is_what_the_loss_took_in_whatever_the_records_say(monkeypatch):
    """A planted fault: the rows of every microbatch take the mask of the row before."""
    before = trained().samples.raw()
    rows = actor_case.ActorRankCore._rows

    def shifted(self, microbatch, batch):
        made = rows(self, microbatch, batch)
        return dataclasses.replace(made, trained_B=made.trained_B.roll(1))

    monkeypatch.setattr(actor_case.ActorRankCore, "_rows", shifted)
    after = trained().samples.raw()
    samples = np.repeat(np.arange(12), LENGTHS)
    assert {int(samples[token]) for token in changed(before, after)["loss_mask"]} == {7, 8}
    assert after["valid"].tolist() == before["valid"].tolist()


# Inputs --------------------------------------------------------------------------------------------------------------


def test_swapped_images_of_equal_size_change_the_image_hash_of_their_groups_alone():
    _, payloads = actor_case.partition()
    before = trained().samples.raw()
    assert len(set(before["image_hash"].tolist())) == 4 and (before["image_hash"][:3] == before["image_hash"][0]).all()
    a, b = payloads[0]["pixel_values"], payloads[3]["pixel_values"]
    assert a.shape == b.shape
    payloads[0] = payloads[0] | {"pixel_values": b}
    payloads[3] = payloads[3] | {"pixel_values": a}
    differ = changed(before, trained(payloads=payloads).samples.raw())
    assert differ["image_hash"] == [0, 1, 2, 9, 10, 11]
    assert "prompt_hash" not in differ and "response_ids" not in differ


@pytest.mark.parametrize(
    ("column", "where", "hashed"),
    [("prompt_ids", 0, "prompt_hash"), ("image_grid_thw", (0, slice(1, None)), "image_hash")],
)
def test_any_change_of_an_input_changes_its_hash(column, where, hashed):
    _, payloads = actor_case.partition()
    array = payloads[0][column].copy()
    array[where] = array[where][::-1] if array[where].ndim else array[where] + 1
    payloads[0] = payloads[0] | {column: array}
    differ = changed(trained().samples.raw(), trained(payloads=payloads).samples.raw())
    assert differ[hashed] == [0, 1, 2]
    assert len({"prompt_hash", "image_hash"} & set(differ)) == 1


def test_hashes_of_inputs_are_fingerprints_that_anyone_can_take_again():
    _, payloads = actor_case.partition()
    raw = trained().samples.raw()
    for group in range(4):
        for hashed, columns in (
            ("prompt_hash", ("prompt_ids", "mm_token_type_ids")),
            ("image_hash", ("pixel_values", "image_grid_thw")),
        ):
            tensors = {name: payloads[group][name] for name in columns}
            assert raw[hashed][3 * group] == int(combine(tensor_sums(tensors)), 16)


# Tensors -------------------------------------------------------------------------------------------------------------


def test_one_flipped_bit_of_a_parameter_is_named():
    actor = trained()
    before = merged([actor.evidence()])
    name, master = list(actor.trainer.master.named().items())[5]
    master.view(torch.int32).view(-1)[3] ^= 1
    after = merged([actor.evidence()])
    assert [n for n, value in after.hashes["parameters"].items() if value != before.hashes["parameters"][n]] == [name]
    assert {n for n in after.fingerprints if after.fingerprints[n] != before.fingerprints[n]} == {"parameters"}


def test_an_optimizer_that_has_not_stepped_has_its_names_and_zeros():
    records, payloads = actor_case.partition()
    records = [dataclasses.replace(record, valid=(False,) * 3) for record in records]
    skipped, applied = (merged([trained(None, p, r).evidence()]) for p, r in ((payloads, records), (None, None)))
    assert list(skipped.hashes["optimizer"]) == list(applied.hashes["optimizer"])
    assert not any(skipped.hashes["optimizer"].values()) and all(
        value for name, value in applied.hashes["optimizer"].items() if name.endswith(".step")
    )


def test_the_fingerprint_of_a_model_counts_what_is_frozen():
    model = tiny.model()
    before = fingerprint_of(model)
    assert before == fingerprint_of(tiny.model()) != fingerprint_of(tiny.model(seed=1))
    frozen = model.get_parameter("model.visual.pos_embed.weight").requires_grad_(False)
    frozen.data.view(-1)[0] += 1
    assert fingerprint_of(model) != before


# Dumps and checkpoints -----------------------------------------------------------------------------------------------


def test_gradients_and_parameters_are_dumped_after_the_partition_that_was_asked_for(tmp_path):
    cfg = actor_case.config(run_dir=str(tmp_path)).with_seams(dump_partition=1)
    actor = actor_case.core(cfg, {})
    for k in range(3):
        records, payloads = actor_case.partition(k)
        actor.fetch = lambda _refs, groups, payloads=payloads: {g: payloads[g] for g in groups}
        actor_case.run_step(actor, records)
        actor.evidence()
        if k == 1:
            expected = {f"parameters.{n}": t.clone() for n, t in actor.trainer.master.named().items()}
            expected |= {f"gradients.{n}": t.clone() for n, t in actor.trainer.master.named_grads().items()}
        actor.end_partition()
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["update_000001-rank-0-of-1.safetensors"]
    found = read_dump(tmp_path, 1)
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == tensor.numpy().tobytes() for name, tensor in expected.items())
    with pytest.raises(StrettoError, match="no whole dump of update 2: found nothing"):
        read_dump(tmp_path, 2)


def test_a_dump_that_cannot_be_written_or_read_is_an_error_that_names_it(tmp_path):
    (tmp_path / "dump").write_text("in the way")
    with pytest.raises(StrettoError, match="cannot be dumped to"):
        write_dump(tmp_path, 0, 0, 1, {"parameters.a": np.zeros(3, np.float32)})
    (tmp_path / "dump").unlink()
    path = write_dump(tmp_path, 0, 0, 1, {"parameters.a": np.zeros(3, np.float32)})
    assert path == dump_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StrettoError, match="is not whole"):
        read_dump(tmp_path, 0)


def test_a_run_of_the_parity_tool_writes_no_checkpoint_not_even_at_its_end():
    for wanted in (True, False):
        run = SimpleNamespace(config=actor_case.config().with_seams(checkpoints=wanted), done=5, last=5)
        assert controller.Run._checkpoint_due(run) is wanted
