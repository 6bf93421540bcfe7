"""Parts that are not trained: their bits, what they cost, and what of them is published, kept and exported."""

from __future__ import annotations

from pathlib import Path

import actor_case
import pytest
import tiny
import torch
from safetensors.torch import load_file

from stretto.actor.checkpoint import latest_valid, read_tensors
from stretto.actor.weights import WeightTags
from stretto.export import export
from stretto.models.parts import prepare
from stretto.models.weights_io import load_buckets
from stretto.observe.manifest import Manifest

CHOICES = [(), ("vision_tower",), ("projector",), ("vision_tower", "projector")]


def config(freeze, run_dir="runs/none", **actor):
    # Without a decay the learning rate of both is the same; updates are not clipped, since a norm is over what trains.
    actor = {"freeze": freeze, "weight_decay": 0.1, "grad_clip": 1e9} | actor
    return actor_case.config(run_dir=run_dir, actor=actor)


def core(cfg, seed=0, **kwargs):
    made = tiny.model(seed, cfg.model.dtype)
    prepare(made, tiny.family(), cfg)
    return actor_case.core(cfg, {}, model=made, **kwargs)


def step(actor, k=0):
    records, payloads = actor_case.partition(k)
    actor.fetch = lambda _refs, groups: {g: payloads[g] for g in groups}
    (metrics,) = actor_case.run_step(actor, records)
    actor.end_partition()
    return metrics


def of(part):
    """Names of a part's parameters, from the modules themselves."""
    model = tiny.model()
    visual = model.model.visual
    projector = {id(p) for m in (visual.merger, visual.deepstack_merger_list) for p in m.parameters()}
    tower = {id(p) for p in visual.parameters()} - projector
    members = {"projector": projector, "vision_tower": tower}[part]
    return {name for name, p in model.named_parameters() if id(p) in members}


def bits(actor):
    return {name: p.detach().clone() for name, p in actor.model.named_parameters()}


def test_every_parameter_belongs_to_one_part():
    family = tiny.family()
    parts = {name: family.part(name) for name, _ in tiny.model().named_parameters()}
    for part in ("projector", "vision_tower"):
        assert {name for name, its in parts.items() if its == part} == of(part)
        assert len(of(part)) > 5
    rest = {name for name, its in parts.items() if its == "language_model"}
    assert rest and all(name.startswith("model.language_model.") for name in rest)


@pytest.mark.parametrize("freeze", CHOICES)
def test_frozen_parts_keep_their_bits_and_the_rest_trains_as_without(freeze):
    actor, free = core(config(freeze)), core(config(()))
    frozen = {name for part in freeze for name in of(part)}
    before = bits(actor)
    step(free)
    expected = {name: g.clone() for name, g in free.trainer.master.named_grads().items()}
    step(actor)
    grads = actor.trainer.master.named_grads()
    assert grads.keys() == before.keys() - frozen
    for name, g in grads.items():
        assert torch.equal(g, expected[name]), name
    step(actor, 1)
    after = bits(actor)
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    assert {name.rpartition(".")[0] for name in actor.trainer.optimizer_tensors()} == after.keys() - frozen
    assert actor.trainer.master.flat_grad.numel() == sum(after[name].numel() for name in after.keys() - frozen)


def test_tags_hold_what_is_trained_and_engines_get_all():
    actor = core(config(("vision_tower", "projector")))
    tags = WeightTags(actor.model)
    tags.save("ref")
    frozen = of("vision_tower") | of("projector")
    assert set(tags._host["ref"]) == bits(actor).keys() - frozen
    step(actor)
    engine = tiny.model(1)
    assert load_buckets(engine, actor.publisher.buckets(1)) == 1
    actor_case.assert_equal_bits({name: p.detach() for name, p in engine.named_parameters()}, bits(actor))


def test_gradient_checkpointing_behind_a_frozen_tower_changes_no_gradient():
    results = []
    for on in (False, True):
        actor = core(config(("vision_tower",), gradient_checkpointing=on, layout="padded"))
        step(actor)
        results.append({name: g.clone() for name, g in actor.trainer.master.named_grads().items()})
    actor_case.assert_equal_bits(*results)


def test_a_checkpoint_holds_what_is_trained_and_its_export_all(tmp_path: Path):
    cfg = config(("vision_tower",), str(tmp_path / "run"))
    straight = core(cfg)
    step(straight)
    path = actor_case.save(straight, 1)
    assert set(read_tensors(path, "masters")) == bits(straight).keys() - of("vision_tower")
    resumed = core(cfg)
    resumed.saving.load(path, latest_valid(path.parent).state)
    assert step(resumed, 1) == step(straight, 1)
    actor_case.assert_equal_bits(bits(resumed), bits(straight))

    actor_case.save(straight, 2)
    plain = cfg.model_dump(mode="json")
    Manifest.start(tmp_path / "run", config=plain, sources={}, seeds={}, model={}, data={}, first_update=0)
    export(tmp_path / "run", tmp_path / "model")
    actor_case.assert_equal_bits(load_file(tmp_path / "model/model.safetensors"), bits(straight))
