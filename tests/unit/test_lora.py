"""LoRA adapters against peft, against the chain rule, and on their way through training, publishing and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import actor_case
import numpy as np
import peft
import pytest
import tiny
import torch
from transformers import Qwen3VLForConditionalGeneration

from stretto import build
from stretto.actor.checkpoint import latest_valid, read_published, read_tensors
from stretto.actor.forward import forward_logprobs
from stretto.actor.weights import WeightTags, iter_buckets
from stretto.config import Config
from stretto.export import export
from stretto.models import lora
from stretto.models.batch import SampleInput
from stretto.models.loading import DTYPES, load_model, save_model, without_weights
from stretto.models.parts import has_dropout, prepare, seed_dropout
from stretto.models.weights_io import load_buckets
from stretto.observe.manifest import Manifest
from stretto.preflight.case import Case
from stretto.preflight.model import model as preflight_model
from stretto.types import ConfigError, StrettoError

# peft asks transformers by a name that goes with transformers 6.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
SCALE = 8.0 / 4


def config(dtype: str = "float32", run_dir: str = "runs/none", actor=None, model=None, **options) -> Config:
    cfg = actor_case.config(
        dtype=dtype,
        run_dir=run_dir,
        actor=actor or {},
        lora={"rank": 4, "alpha": 8.0} | options,
    )
    return cfg.model_copy(update={"model": cfg.model.model_copy(update=model or {})})


def model(cfg: Config, *, moved: bool = True, seed: int = 0):
    """A model with adapters; ``moved``: as after training, B not zero."""
    made = load_model(cfg.model, cfg.run.seed)
    if cfg.lora.rank:
        lora.inject(made, cfg.lora, cfg.run.seed + seed)
    if moved:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, p in made.named_parameters():
                if "lora_B" in name:
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return made


def batch(layout: str = "padded"):
    family = tiny.family()
    answers = [family.encode_answer("3+5=8"), family.encode_answer("1"), family.encode_answer("12")]
    distinct = [family.process(tiny.prompt(i, images)) for i, images in enumerate(actor_case.IMAGES[:3])]
    samples = [SampleInput(p, r) for p in distinct for r in answers]
    return family.collate(samples, layout=layout)


def logits(made, layout: str = "padded"):
    with torch.no_grad():
        return tiny.family().response_logits(made, batch(layout))


def bits(made):
    return {name: p.detach().clone() for name, p in made.named_parameters()}


def nll(logprobs_T, _entropy_T):
    return -logprobs_T.sum(), {}


def steps(actor, count, start=0):
    result = []
    for k in range(start, start + count):
        records, payloads = actor_case.partition(k)
        actor.fetch = lambda _refs, groups, payloads=payloads: {g: payloads[g] for g in groups}
        result.append(actor_case.run_step(actor, records)[0])
        actor.end_partition()
    return result


# Put in --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_fresh_adapters_leave_the_logits_bit_for_bit(dtype, layout):
    cfg = config(dtype, dropout=0.5)
    base, adapted = load_model(cfg.model, 0), model(cfg, moved=False)
    assert torch.equal(logits(base, layout), logits(adapted, layout))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all(".lora_" in name for name in trained)
    assert {p.dtype for p in adapted.parameters()} == {DTYPES[dtype]}
    assert not torch.equal(logits(base, layout), logits(model(cfg), layout)), "B that is not zero is no control"


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_both_layouts_forward_adapters_alike(layout):
    """Against the plain model that holds the merged weights, made by hand."""
    cfg = config()
    adapted = model(cfg)
    named, plain = dict(adapted.named_parameters()), load_model(cfg.model, 0)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.default.weight" in named:
                a, b = (named[f"{layer}.lora_{half}.default.weight"] for half in "AB")
                p.copy_(p.double() + SCALE * b.double() @ a.double())
    torch.testing.assert_close(logits(adapted, layout), logits(plain, layout), rtol=0, atol=2e-5)


def test_adapters_are_the_same_whatever_was_drawn_before_and_draw_nothing_themselves():
    cfg = config()
    torch.manual_seed(1)
    first = bits(model(cfg, moved=False))
    torch.manual_seed(2)
    torch.rand(3)
    before = torch.get_rng_state()
    made = load_model(cfg.model, 0)
    prepare(made, tiny.family(), cfg)
    assert torch.equal(torch.get_rng_state(), before)
    actor_case.assert_equal_bits(bits(made), first)
    other = bits(model(cfg, moved=False, seed=1))
    assert not torch.equal(
        *(x["model.language_model.layers.0.mlp.up_proj.lora_A.default.weight"] for x in (first, other))
    )


def untied():
    return {"config": copy.deepcopy(tiny.BLOCK) | {"tie_word_embeddings": False}}


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_proj", "qproj"), r"no layer 'qproj'; did you mean 'q_proj'\? Its linear layers are down_proj, gate_proj"),
        (("proj",), r"'model.visual.patch_embed.proj', which 'proj' names, is no linear layer"),
        (("embed_tokens",), r"'model.language_model.embed_tokens', .* is no linear layer"),
        (("lm_head",), r"'lm_head' shares its weight with the embeddings"),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_refused_alike_by_run_and_doctor(targets, said):
    cfg = config(targets=targets)
    with pytest.raises(ConfigError, match=rf"lora.targets = \[.*{said}"):
        prepare(load_model(cfg.model, 0), tiny.family(), cfg)
    with pytest.raises(ConfigError, match=said):
        lora.check(without_weights(cfg.model), cfg.lora)
    for training in (True, False):
        case = Case(cfg, {}, training=training, thorough=False, resume=False, note=lambda *_, **__: None)
        found = list(preflight_model(case))
        assert [line.names for line in found] == ([("lora.targets",)] if training else [])


def test_layers_of_the_vision_tower_and_an_untied_head_can_have_adapters():
    cfg = config(targets=("qkv", "visual.blocks.1.attn.proj", "lm_head"), model=untied())
    made = model(cfg, moved=False)
    trained = {name.partition(".lora_")[0] for name, p in made.named_parameters() if p.requires_grad}
    tower = {f"model.visual.blocks.{i}.attn.qkv" for i in range(2)}
    assert trained == {"lm_head", "model.visual.blocks.1.attn.proj", *tower}
    assert torch.equal(logits(made), logits(load_model(cfg.model, 0)))
    moved = model(cfg)
    plain = load_model(cfg.model, 1)
    load_buckets(plain, iter_buckets(lora.published(moved, cfg), 0, torch.float32))
    torch.testing.assert_close(logits(moved), logits(plain), rtol=0, atol=2e-5)
    biases = [name for name in lora.merged(moved, cfg.lora) if name.endswith("qkv.bias")]
    assert len(biases) == 2, "the bias of a layer with an adapter is published, too"


def test_without_peft_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"lora.rank = 4: .* pip install 'stretto\[lora\]'"):
        lora.inject(tiny.model(), config().lora, 0)


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_gradients_obey_the_chain_rule(layout):
    """dL/dB = scale * dL/dW A^T and dL/dA = scale * B^T dL/dW, with dL/dW of the plain model with merged weights."""
    cfg = config()
    adapted, plain = model(cfg), load_model(cfg.model, 0)
    load_buckets(plain, iter_buckets(lora.merged(adapted, cfg.lora), 0, torch.float32))
    for made in (adapted, plain):
        forward_logprobs(tiny.family(), made, batch(layout), 1.0)[0].sum().backward()
    full = {name: p.grad.double() for name, p in plain.named_parameters()}
    named = dict(adapted.named_parameters())
    compared = 0
    for name, p in named.items():
        if not p.requires_grad:
            assert p.grad is None
            continue
        layer, _, rest = name.partition(".lora_")
        a, b = (named[f"{layer}.lora_{half}.default.weight"].detach().double() for half in "AB")
        weight = full[f"{layer}.weight"]
        expected = SCALE * (b.T @ weight if rest.startswith("A") else weight @ a.T)
        gap = (p.grad.double() - expected).norm() / expected.norm()
        assert gap < 2e-5, (name, float(gap))
        compared += 1
    assert compared == 28


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_moves_adapters_alone_with_float32_masters(dtype):
    cfg = config(dtype, actor={"lr": 1e-2, "warmup_updates": 0})
    actor = actor_case.core(cfg, {}, model=model(cfg, moved=False))
    before = bits(actor.model)
    metrics = steps(actor, 2)
    assert all(m["update_skipped"] == 0 and m["grad_norm"] > 0 for m in metrics)
    assert metrics[0]["ratio_deviation_max"] == 0.0, "log-probs before the update are those of training"
    after = bits(actor.model)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if ".lora_" in name}
    assert set(actor.trainer.master.names) == moved
    assert {name.rpartition(".")[0] for name in actor.trainer.optimizer_tensors()} == moved
    tensors = [*actor.trainer.master.named().values(), *actor.trainer.master.named_grads().values()]
    assert {t.dtype for t in [*tensors, *actor.trainer.optimizer_tensors().values()]} == {torch.float32}
    for name, master in actor.trainer.master.named().items():
        assert torch.equal(after[name], master.to(DTYPES[dtype]))
    assert (actor.trainer.master.flat_grad.numel(), len(moved)) == (4096, 28)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_changes_no_gradient(dropout):
    """Nor the log-probs of training, where the second forward must draw the dropout of the first."""
    results, calls = [], []
    for on in (False, True):
        cfg = config(actor={"gradient_checkpointing": on, "layout": "padded"}, dropout=dropout)
        actor = actor_case.core(cfg, {}, model=model(cfg))
        actor.model.model.language_model.layers[1].mlp.register_forward_pre_hook(lambda *_, on=on: calls.append(on))
        torch.manual_seed(3)
        actor.trainer.begin()
        for layout_batch in (batch(), batch()):
            actor.trainer.train(layout_batch, nll)
        results.append({name: g.clone() for name, g in actor.trainer.master.named_grads().items()})
        assert not actor.model.training
    assert (calls.count(False), calls.count(True)) == (2, 4)
    actor_case.assert_equal_bits(*results)


def dropping(kind: str) -> tuple[Config, torch.nn.Module]:
    """A model with dropout in its adapters, or in its attention."""
    if kind == "adapters":
        cfg = config(dropout=0.3)
        return cfg, model(cfg)
    block = copy.deepcopy(tiny.BLOCK)
    block["text"]["attention_dropout"] = 0.3
    cfg = actor_case.config(model={"config": block})
    return cfg, load_model(cfg.model, 0)


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("kind", ["adapters", "attention"])
def test_dropout_is_drawn_by_training_alone_and_repeats_from_the_state_of_the_generator(kind, layout):
    cfg, made = dropping(kind)
    family, trainer = tiny.family(), actor_case.core(cfg, {}, model=made).trainer
    assert has_dropout(made) and not has_dropout(model(config())) and not has_dropout(tiny.model())
    assert not any(module.training for module in made.modules())

    def train():
        trainer.begin()
        return trainer.train(batch(layout), nll), trainer.master.flat_grad.clone()

    before = torch.get_rng_state()
    plain, _ = forward_logprobs(family, made, batch(layout), 1.0)
    assert torch.equal(torch.get_rng_state(), before)
    first = train()
    assert not torch.equal(torch.get_rng_state(), before)
    second = train()
    torch.set_rng_state(before)
    again = train()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], plain)
    assert not any(module.training for module in made.modules())
    assert torch.equal(forward_logprobs(family, made, batch(layout), 1.0)[0], plain)
    with pytest.raises(ZeroDivisionError):
        trainer.train(batch(layout), lambda *_: 1 / 0)
    assert not any(module.training for module in made.modules()), "an error leaves no dropout on"


def test_dropout_keeps_the_expectation():
    """The mean over draws of what one adapter adds is what it adds without dropout."""
    cfg = config(dropout=0.5)
    layer = model(cfg).model.language_model.layers[0].mlp.up_proj
    x = torch.randn(1, 32)
    with torch.no_grad():
        plain, base = layer(x), layer.base_layer(x)
        layer.train()
        added = layer(x.expand(20_000, -1)) - base
    error = added.std(0) / np.sqrt(20_000)
    assert ((added.mean(0) - (plain - base)[0]).abs() < 5 * error).all()


def test_each_rank_draws_another_dropout_and_every_run_the_same():
    def drawn(seed: int, rank: int) -> tuple[float, ...]:
        seed_dropout(seed, rank)
        return tuple(torch.rand(4).tolist())

    streams = [drawn(seed, rank) for seed in (0, 1, 2**31 - 1) for rank in range(4)]
    assert len(set(streams)) == 12
    assert drawn(1, 2) == drawn(1, 2)


def test_tags_hold_adapters_alone():
    cfg = config()
    made = model(cfg, moved=False)
    tags = WeightTags(made)
    tags.save("ref")
    assert set(tags._host["ref"]) == {name for name, p in made.named_parameters() if p.requires_grad}
    reference = logits(made)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name:
                p.add_(0.1)
    trained = logits(made)
    assert not torch.equal(trained, reference)
    with tags.active("ref"):
        assert torch.equal(logits(made), reference)
    assert torch.equal(logits(made), trained)


# Publishing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_those_of_peft(dtype):
    cfg = config(dtype)
    adapted = model(cfg)
    wrapped = peft.get_peft_model(
        load_model(cfg.model, 0),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(cfg.lora.targets)),
        autocast_adapter_dtype=False,
    )
    theirs = dict(wrapped.named_parameters())
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if p.requires_grad:
                theirs[f"base_model.model.{name}"].copy_(p)
    expected = bits(wrapped.merge_and_unload())
    plain = load_model(cfg.model, 1)
    buckets = list(iter_buckets(lora.published(adapted, cfg), 3, DTYPES[dtype], 20_000))
    assert load_buckets(plain, buckets) == 3
    assert expected.keys() == bits(plain).keys()
    untouched = 0
    for name, p in bits(plain).items():
        # peft rounds B @ A to bfloat16 before it adds, here the sum alone is rounded: one unit in the last place.
        rel = 1e-6 if dtype == "float32" else 2**-7
        torch.testing.assert_close(p, expected[name], rtol=rel, atol=rel * 0.05)
        untouched += torch.equal(p, bits(load_model(cfg.model, 0))[name])
    assert len(expected) - untouched == 14


def test_merging_into_bfloat16_rounds_once():
    """Against float64, rounded: of 10,000 weights few lie so close to a tie that float32 rounds the other way."""
    cfg = config("bfloat16")
    adapted = model(cfg)
    named = dict(adapted.named_parameters())
    different = total = 0
    for name, weight in lora.merged(adapted, cfg.lora).items():
        if not isinstance(weight, lora.MergedWeight):
            continue
        layer = name.removesuffix(".weight")
        base, a, b = (
            named[f"{layer}.{part}.weight"].detach().double()
            for part in ("base_layer", "lora_A.default", "lora_B.default")
        )
        expected = (base + SCALE * b @ a).to(torch.bfloat16)
        assert weight.shape == expected.shape and weight.numel() == expected.numel()
        different += int((weight.detach().to(torch.bfloat16) != expected).sum())
        total += expected.numel()
    assert total > 10_000 and different <= total / 1000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_adapters_make_the_engine_the_actor_bit_for_bit(dtype):
    cfg = config(dtype, publish="adapter", dropout=0.2)
    actor = actor_case.core(cfg, {}, model=model(cfg))
    engine = build.engine(cfg, "cpu", 0)
    actor_case.assert_equal_bits(bits(engine.model), bits(model(cfg, moved=False)))
    buckets = list(actor.publisher.buckets(4))
    assert sum(array.nbytes for b in buckets for array in b.data) == 4096 * DTYPES[dtype].itemsize
    engine._load(4, buckets)
    assert engine.version == 4
    actor_case.assert_equal_bits(bits(engine.model), bits(actor.model))
    assert torch.equal(logits(engine.model), logits(actor.model))
    engine.kill()


def test_an_engine_takes_neither_less_nor_more_than_what_is_published_to_it():
    adapter, merged = config(publish="adapter"), config()
    made = model(adapter)
    with pytest.raises(StrettoError, match=r"embed_tokens.weight' is not a parameter"):
        everything = dict(made.named_parameters())
        load_buckets(model(adapter), iter_buckets(everything, 0, torch.float32))
    with pytest.raises(StrettoError, match="is not a parameter"):
        load_buckets(model(adapter), iter_buckets(lora.published(made, merged), 0, torch.float32))
    with pytest.raises(StrettoError, match=r"lora_A.default.weight' is not a parameter"):
        load_buckets(tiny.model(), iter_buckets(lora.published(made, adapter), 0, torch.float32))
    few = {name: p for name, p in lora.published(made, adapter).items() if "lora_B" in name}
    with pytest.raises(StrettoError, match="lack 14 parameters"):
        load_buckets(model(adapter), iter_buckets(few, 0, torch.float32))


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {}, {"publish": "adapter"}, {"publish": "adapter", "targets": ("qkv",)}]
)
def test_the_size_of_a_version_is_known_before_it_is_made(options):
    for dtype in ("float32", "bfloat16"):
        cfg = config(dtype, **options)
        made = model(cfg)
        buckets = iter_buckets(lora.published(made, cfg), 0, DTYPES[dtype])
        assert lora.published_bytes(cfg) == sum(array.nbytes for b in buckets for array in b.data)


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "publish", "dropout"),
    [("float32", "adapter", 0.2), ("bfloat16", "merged", 0.2), ("float32", "merged", 0.0)],
)
def test_stop_and_resume_equals_a_straight_run_bit_for_bit(tmp_path: Path, dtype, publish, dropout):
    cfg = config(dtype, run_dir=str(tmp_path), publish=publish, dropout=dropout)

    def core(seed=0):
        made = actor_case.core(cfg, {}, model=model(cfg, moved=False, seed=seed))
        seed_dropout(seed)
        return made

    straight = core()
    expected = steps(straight, 4)
    first = core()
    assert steps(first, 2) == expected[:2]
    published = list(first.publisher.buckets(1))
    path = actor_case.save(first, 2, published={1: lambda: published})
    assert set(read_tensors(path, "masters")) == set(first.trainer.master.names)

    resumed = core(seed=99)
    found = latest_valid(tmp_path / "checkpoints")
    resumed.saving.load(found.path, found.state)
    assert steps(resumed, 2, start=2) == expected[2:]
    actor_case.assert_equal_bits(bits(straight.model), bits(resumed.model))
    actor_case.assert_equal_bits(straight.trainer.optimizer_tensors(), resumed.trainer.optimizer_tensors())

    kept = read_published(path)[1]
    names = {meta.name for bucket in kept for meta in bucket.metas}
    assert any(".lora_" in name for name in names) == (publish == "adapter")
    engines = [build.engine(cfg, "cpu", 0) for _ in range(2)]
    for engine, buckets in zip(engines, (published, kept), strict=True):
        engine._load(1, buckets)
        engine.kill()
    actor_case.assert_equal_bits(*(bits(engine.model) for engine in engines))


def exported(tmp_path: Path, cfg: Config, made):
    """A run folder whose one checkpoint holds ``made``."""
    actor = actor_case.core(cfg, {}, model=made)
    path = actor_case.save(actor, 3)
    plain = cfg.model_dump(mode="json")
    Manifest.start(Path(cfg.run.dir), config=plain, sources={}, seeds={}, model={}, data={}, first_update=0)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_export_is_what_engines_got_and_plain_transformers_loads_it(tmp_path, dtype):
    cfg = config(dtype, run_dir=str(tmp_path / "run"), dropout=0.1)
    made = model(cfg)
    path = exported(tmp_path, cfg, made)
    assert export(tmp_path / "run", tmp_path / "model") == path
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=DTYPES[dtype])
    engine = build.engine(cfg, "cpu", 0)
    engine._load(0, list(iter_buckets(lora.published(made, cfg), 0, DTYPES[dtype])))
    engine.kill()
    actor_case.assert_equal_bits(bits(loaded), bits(engine.model))
    if dtype == "float32":
        torch.testing.assert_close(logits(loaded), logits(made), rtol=0, atol=2e-5)


@pytest.mark.parametrize("folder", [False, True])
def test_an_adapter_export_is_a_folder_of_peft(tmp_path, folder):
    cfg = config(run_dir=str(tmp_path / "run"), dropout=0.1, publish="adapter")
    if folder:  # a run that began with a model's folder
        save_model(tiny.family(), load_model(cfg.model, 7), tmp_path / "begun")
        cfg = cfg.model_copy(
            update={"model": cfg.model.model_copy(update={"path": str(tmp_path / "begun"), "config": None})}
        )
    made = model(cfg)
    path = exported(tmp_path, cfg, made)
    assert export(tmp_path / "run", tmp_path / "adapter", 3, adapter=True) == path
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (written["peft_type"], written["r"], written["lora_alpha"], written["lora_dropout"]) == ("LORA", 4, 8, 0.1)
    assert set(written["target_modules"]) == set(cfg.lora.targets)
    assert written["base_model_name_or_path"] == (str(tmp_path / "begun") if folder else None)
    base = (
        Qwen3VLForConditionalGeneration.from_pretrained(written["base_model_name_or_path"])
        if folder
        else load_model(cfg.model, 0)
    )
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded.base_model.model), logits(made))
    assert torch.equal(logits(loaded.merge_and_unload()), logits(peft_free(cfg, made)))


def peft_free(cfg: Config, made):
    plain = load_model(cfg.model, 0)
    load_buckets(plain, iter_buckets(lora.merged(made, cfg.lora), 0, torch.float32))
    return plain


def test_a_run_without_adapters_has_none_to_export(tmp_path):
    cfg = actor_case.config(run_dir=str(tmp_path / "run"))
    exported(tmp_path, cfg, tiny.model())
    with pytest.raises(StrettoError, match=r"lora.rank = 0.* export it without --adapter"):
        export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()
