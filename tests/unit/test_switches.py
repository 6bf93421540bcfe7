"""Switches as objects: what sets them, what refuses them, what shows that they engaged."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
from pathlib import Path

import pytest
import tiny

from stretto import conditions, switches
from stretto.checks import cross_field_problems
from stretto.config import Config
from stretto.controls import CONTROLS
from stretto.models.loading import save_model
from stretto.preflight import examine
from stretto.settings import OPTIONS, load
from stretto.switches.base import Bounded, Exact
from stretto.types import ConfigError

MODEL = "model.path=org/model"
P, R, S = switches.ALL
CONTROL_R = R.env


def config(**tables) -> Config:
    return Config.model_validate({"model": {"path": "org/model"}} | tables)


def problems(environ, sets=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(None, [MODEL, *sets], environ)
    return caught.value.problems


# The list --------------------------------------------------------------------------------------------------------


def test_there_are_three_and_all_are_off():
    assert [(s.letter, s.name, s.env) for s in switches.ALL] == [
        ("P", "processor_pool", "MM_PROCESSOR_POOL_SIZE"),
        ("R", "logprob_reuse", "HYBRID_REUSE_TRAIN_LOGPROBS"),
        ("S", "chunk_overlap", "HYBRID_PIPELINE_FORWARD"),
    ]
    assert {s.env: f"switches.{s.name}" for s in switches.ALL} == CONTROLS
    assert {f"switches.{s.name}" for s in switches.ALL} == {n for n in OPTIONS if n.startswith("switches.")}
    assert switches.on(config()) == () and switches.condition(config()) == "B"
    assert switches.applied(config()) == config()


@pytest.mark.parametrize("switch", switches.ALL)
def test_a_switch_changes_a_seam_and_nothing_else(switch):
    on = config(switches={switch.name: 2 if switch is P else True})
    before, after = on.model_dump(), switches.applied(on).model_dump()
    changed = {key for key in before["seams"] if before["seams"][key] != after["seams"][key]}
    assert len(changed) == 1
    assert {k: v for k, v in before.items() if k != "seams"} == {k: v for k, v in after.items() if k != "seams"}
    assert on.seams == Config().seams, "apply must not mutate"
    assert isinstance(switch.numerics(on), Exact | Bounded)


def test_r_is_bounded_where_a_forward_without_gradient_has_other_bits_on_any_rank():
    same, other = {"no_grad_is_grad": True}, {"no_grad_is_grad": False}
    on = {"switches": {"logprob_reuse": True, "processor_pool": 1}}
    assert conditions.recorded(config(**on), same) == {
        "condition": "P+R",
        "processor_pool": {"numerics": "exact"},
        "logprob_reuse": {"numerics": "exact"},
    }
    assert list(conditions.inexact(config(**on), {"ranks": [same, same]})) == []
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.1)):
        found = config(**on, model={"path": "org/model", "dtype": dtype})
        entry = conditions.recorded(found, {"ranks": [same, other]})
        assert entry["processor_pool"] == {"numerics": "exact"}
        assert entry["logprob_reuse"] == {
            "numerics": "bounded",
            "tolerance": tolerance,
            "why": "on this device a forward without gradient has other bits than the training forward",
        }
        (text,) = conditions.inexact(found, other)
        assert text.startswith("R is not exact here") and "without gradient" in text
    assert conditions.recorded(config(), other) == {"condition": "B"}


def test_only_a_switch_can_set_a_seam(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "org/model"\n[seams]\nphase1 = "chunks"\n')
    with pytest.raises(ConfigError, match=r"seams.*no such block"):
        load(recipe, (), {})
    for sets, environ in ((["seams.phase1=chunks"], {}), ([], {"STRETTO_SEAMS__PHASE1": "chunks"})):
        with pytest.raises(ConfigError, match="no such"):
            load(None, [MODEL, *sets], environ)


# Controls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "condition"),
    [
        ({}, "B"),
        ({"MM_PROCESSOR_POOL_SIZE": "0", "HYBRID_REUSE_TRAIN_LOGPROBS": "0", "HYBRID_PIPELINE_FORWARD": "0"}, "B"),
        ({"MM_PROCESSOR_POOL_SIZE": "8"}, "P"),
        ({"MM_PROCESSOR_POOL_SIZE": "8", "HYBRID_REUSE_TRAIN_LOGPROBS": "1", "HYBRID_PIPELINE_FORWARD": "0"}, "P+R"),
        ({"MM_PROCESSOR_POOL_SIZE": "8", "HYBRID_REUSE_TRAIN_LOGPROBS": "0", "HYBRID_PIPELINE_FORWARD": "1"}, "P+S"),
    ],
)
def test_controls_set_the_conditions(environ, condition):
    found, sources = load(None, [MODEL], environ)
    assert switches.condition(found) == condition
    assert [sources[CONTROLS[control]] for control in environ] == [f"environment {control}" for control in environ]


def test_environment_beats_file_and_the_command_line_beats_both(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "org/model"\n[switches]\nprocessor_pool = 2\n')
    environ = {"MM_PROCESSOR_POOL_SIZE": "4"}
    assert load(recipe, (), {})[0].switches.processor_pool == 2
    assert load(recipe, (), environ)[0].switches.processor_pool == 4
    found, sources = load(recipe, ["switches.processor_pool=6"], environ)
    assert (found.switches.processor_pool, sources["switches.processor_pool"]) == (6, "--set")


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("value", ["yes", "2x", "", "-1", " 1", "1.0", "true", "01", "+1", "٣"])
def test_a_malformed_control_is_refused_with_the_accepted_forms(control, value):
    (text,) = problems({control: value})
    assert text.startswith(f'{control} = "{value}" (environment): expected ')
    assert ("an integer of at least 0" if control == "MM_PROCESSOR_POOL_SIZE" else "0 or 1") in text


@pytest.mark.parametrize("size", ["1025", "9" * 5000])  # of the second, int() would raise
def test_a_pool_that_no_machine_holds_is_refused(size):
    (text,) = problems({"MM_PROCESSOR_POOL_SIZE": size})
    assert "MM_PROCESSOR_POOL_SIZE" in text and "an integer of at least 0" in text


def test_two_is_a_pool_size_and_no_switch_position():
    assert load(None, [MODEL], {"MM_PROCESSOR_POOL_SIZE": "2"})[0].switches.processor_pool == 2
    (text,) = problems({"HYBRID_PIPELINE_FORWARD": "2"})
    assert "expected 0 or 1" in text


def test_two_variables_for_one_switch_must_agree():
    environ = {"STRETTO_SWITCHES__CHUNK_OVERLAP": "true", "HYBRID_PIPELINE_FORWARD": "0"}
    (text,) = problems(environ)
    assert "HYBRID_PIPELINE_FORWARD" in text and "STRETTO_SWITCHES__CHUNK_OVERLAP" in text and "unset one" in text
    assert load(None, [MODEL], environ | {"HYBRID_PIPELINE_FORWARD": "1"})[0].switches.chunk_overlap


def test_r_with_s_is_refused_by_the_options_and_by_both_guards():
    (text,) = problems({"HYBRID_REUSE_TRAIN_LOGPROBS": "1", "HYBRID_PIPELINE_FORWARD": "1"})
    assert "R leaves no old-policy forward for S to overlap" in text and "switch one of them off" in text
    both = config(switches={"logprob_reuse": True, "chunk_overlap": True})
    for switch in (R, S):
        assert any("their effects must not be conflated" in reason for reason in switch.guards(both))


# Guards ----------------------------------------------------------------------------------------------------------

BREAKS_R = [
    ({"actor": {"minis_per_partition": 2}}, "actor.minis_per_partition = 2", "set it to 1"),
    ({"actor": {"epochs": 2}}, "actor.epochs = 2", "set it to 1"),
    ({"lora": {"rank": 4, "dropout": 0.1}}, "lora.dropout = 0.1", "set it to 0"),
    ({"algorithm": {"kl_reward_coef": 0.1}}, "algorithm.kl_reward_coef = 0.1", "set it to 0"),
    ({"algorithm": {"kl_loss_coef": 0.1}}, "algorithm.kl_loss_coef = 0.1", "set it to 0"),
    ({"algorithm": {"teacher": "org/teacher"}}, "algorithm.teacher = 'org/teacher'", "leave it out"),
    ({"algorithm": {"old_policy": "old_actor"}}, "algorithm.old_policy = 'old_actor'", 'set it to "actor"'),
    ({"algorithm": {"old_policy": "rollout"}}, "algorithm.old_policy = 'rollout'", 'set it to "actor"'),
    ({"actor": {"before_logprob_hook": "a:b"}}, "actor.before_logprob_hook = 'a:b'", "leave it out"),
    (
        {"algorithm": {"importance_correction": "none"}},
        "staleness.max = 1 without importance",
        '"tis" or "mis"',
    ),
]
BREAKS_S = [
    ({"actor": {"minis_per_partition": 2}}, "actor.minis_per_partition = 2", "set it to 1"),
    ({"actor": {"chunks_per_mini": 3}}, "actor.chunks_per_mini = 3", "choose a divisor"),
    ({"actor": {"chunks_per_mini": 1}}, "actor.chunks_per_mini = 1", "set it to at least 2"),
    ({"rollout": {"refill_rounds": 2}}, "rollout.refill_rounds = 2", "set it to 0"),
    ({"algorithm": {"old_policy": "rollout"}}, 'algorithm.old_policy = "rollout"', 'set it to "actor"'),
]


@pytest.mark.parametrize(("tables", "what", "remedy"), BREAKS_R)
def test_each_guard_of_r_alone(tables, what, remedy):
    (reason,) = R.guards(config(**tables))
    assert what in reason and remedy in reason


def test_attention_dropout_is_a_guard_of_r():
    text = {"attention_dropout": 0.1}
    (reason,) = R.guards(config(model={"config": {"text": text}}))
    assert "model.config.text.attention_dropout = 0.1" in reason


@pytest.mark.parametrize(("tables", "what", "remedy"), BREAKS_S)
def test_each_guard_of_s_alone(tables, what, remedy):
    (reason,) = S.guards(config(**tables))
    assert what in reason and remedy in reason


def test_every_broken_guard_is_listed_at_once():
    broken = config(
        actor={"minis_per_partition": 2, "epochs": 2}, algorithm={"kl_loss_coef": 0.1}, lora={"rank": 4, "dropout": 0.5}
    )
    assert len(R.guards(broken)) == 4
    assert switches.refusals(broken) == []  # it is off
    on = broken.model_copy(update={"switches": broken.switches.model_copy(update={"logprob_reuse": True})})
    assert len(switches.refusals(on)) == 4
    with pytest.raises(ConfigError, match=r"R: actor\.minis_per_partition = 2"):  # whoever applies cannot pass them by
        switches.applied(on)


def test_a_start_says_what_would_refuse_each_switch_that_is_off():
    config = Config.model_validate({"actor": {"epochs": 2, "chunks_per_mini": 1}})
    lines = list(conditions.closed(config))
    assert [line.partition(" could not be switched on: ")[0] for line in lines] == ["R", "S"]
    assert "actor.epochs = 2" in lines[0] and "actor.chunks_per_mini = 1" in lines[1]
    on = {"switches": {"logprob_reuse": True}}
    assert not list(conditions.closed(Config.model_validate(on)))  # that R and S exclude one another is no news


def test_no_guard_breaks_under_the_defaults():
    assert [switch.guards(config()) for switch in switches.ALL] == [[], [], []]


def test_doctor_says_who_set_each_switch_and_what_would_refuse_it(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "none/such"\n[actor]\nepochs = 2\n[switches]\nchunk_overlap = true\n')
    found = examine(recipe, ["switches.logprob_reuse=false"], {"MM_PROCESSOR_POOL_SIZE": "4"}, thorough=True)
    (finding,) = [f for f in found.findings if f.topic == "switches"]
    lines = [line.text for line in finding.lines]
    assert lines[0] == "condition P+S"
    assert any(t.startswith("P  switches.processor_pool = 4 (environment MM_PROCESSOR_POOL_SIZE): on") for t in lines)
    assert any(t.startswith("R  switches.logprob_reuse = false (--set): off") for t in lines)
    assert any(t.strip().startswith("could not be switched on: actor.epochs = 2") for t in lines)
    assert any(t.startswith("S  switches.chunk_overlap = true (file") for t in lines)
    many = examine(recipe, ["actor.epochs=1"], {"MM_PROCESSOR_POOL_SIZE": "1000"}, thorough=True)
    (finding,) = [f for f in many.findings if f.topic == "switches"]
    assert any(t.text.startswith("1000 processor workers, 1 actor rank and 1 engine share ") for t in finding.lines)


def test_guards_are_listed_beside_options_that_do_not_fit_together():
    """R with S, and stale samples without correction, are refused by the options; that must hide no guard."""
    base = ["model.path=none/such", "switches.logprob_reuse=true", "actor.epochs=2"]

    def found(*sets, environ=None):
        case = examine(None, [*base, *sets], environ or {}, thorough=True)
        (switches_,) = [f for f in case.findings if f.topic == "switches"]
        return [p.text for p in case.problems], [line.text for line in switches_.lines]

    texts, lines = found("switches.chunk_overlap=true", "actor.chunks_per_mini=1")
    assert sum("must not be conflated" in text for text in texts) == 1
    assert any("actor.epochs = 2" in text for text in texts) and any("chunks_per_mini = 1" in text for text in texts)
    assert any(line.startswith("S  switches.chunk_overlap = true (--set): on") for line in lines)
    texts, _ = found("algorithm.importance_correction=none", "algorithm.kl_loss_coef=0.1")
    assert any("kl_loss_coef = 0.1" in text for text in texts) and any("actor.epochs = 2" in text for text in texts)
    _, lines = found(environ={"MM_PROCESSOR_POOL_SIZE": "yes"})  # which values are meant is not known
    assert lines == ["not looked at, since there is a problem with switches.processor_pool"]


# Evidence --------------------------------------------------------------------------------------------------------


def span(name, start, end, **attrs):
    return {"type": "span", "name": name, "process": "x", "start_ns": start, "end_ns": end, **attrs}


def test_p_engaged_names_workers_and_their_jobs():
    jobs = [span("processor.process", i, i + 1, row_id=str(i), worker=10 + i % 2) for i in range(5)]
    evidence = P.engaged(jobs)
    assert evidence.ok and set(evidence.facts) == {"worker 10: 3 prompts", "worker 11: 2 prompts"}
    assert not P.engaged([*jobs, span("processor.process", 9, 10, row_id="inline")]).ok
    assert not P.engaged([]).ok


def test_r_engaged_counts_forwards_and_samples():
    trained = [span("actor.train", i, i + 1, samples=4, reused=4) for i in range(3)]
    assert R.engaged(trained).ok
    assert not R.engaged([*trained, span("actor.forward", 0, 1, role="old", partition=0)]).ok
    assert not R.engaged([*trained, span("actor.train", 8, 9, samples=4, reused=3)]).ok
    assert not R.engaged([]).ok


def partition(k, claims, put_end, forward_start):
    """Times in tenths of a second."""
    tenth = 10**8
    chunks = [
        span("loop.claim", at * tenth, (at + 1) * tenth, partition=k, chunk=c, chunks=2) for c, at in enumerate(claims)
    ]
    puts = [span("plane.put", (put_end - 5) * tenth, put_end * tenth, partition=k, group=0)]
    forward = span("actor.forward", forward_start * tenth, (forward_start + 3) * tenth, role="old", partition=k)
    return [*chunks, *puts, forward]


def test_s_engaged_needs_overlap_where_there_was_a_chance():
    overlapped = partition(0, (0, 10), put_end=20, forward_start=5)
    late = partition(1, (100, 110), put_end=120, forward_start=125)
    idle = partition(2, (200, 201), put_end=150, forward_start=202)
    assert S.engaged(overlapped).ok and S.engaged([*overlapped, *late]).ok
    assert not S.engaged(late).ok  # a chance, and no overlap
    nothing = S.engaged(idle)
    assert nothing.ok and not nothing.opportunity  # engaged, nothing to overlap
    at_once = S.engaged(partition(3, (0, 1), put_end=1.5, forward_start=1.6))  # the last group right after the first
    assert at_once.ok and not at_once.opportunity


def test_claims_of_whole_partitions_are_no_s_though_they_leave_nothing_to_overlap():
    whole = partition(0, (0,), put_end=1, forward_start=2)  # the claim waits for the last put
    evidence = S.engaged(whole)
    assert not evidence.ok and evidence.opportunity
    assert evidence.facts[0] == "0 of 1 partitions claimed chunk by chunk"
    assert S.engaged([]).opportunity and not S.engaged([]).ok


def test_options_checks_do_not_import_the_switches():
    import stretto.checks

    assert "stretto.switches" not in inspect.getsource(stretto.checks)
    assert cross_field_problems(config(), {}) == []


def test_the_documented_matrix_is_that_of_the_guards():
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("switch_matrix", root / "scripts" / "switch_matrix.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    document = table.DOCUMENT.read_text(encoding="utf-8")
    assert document == table.rendered(document), "run: make fmt"
    broken_r = {name for name, tables in table.FEATURES.items() if table.cell(R, tables).startswith("refused")}
    assert len(broken_r) == 11  # by hand: ten features, and S
    stale = {s.letter: table.cell(s, {"algorithm": {"importance_correction": "none"}}) for s in switches.ALL}
    assert stale["P"] == stale["S"] == "refused, as without it: stale samples need an off-policy correction"


@pytest.mark.parametrize("name", ["b", "p", "p-r", "p-s"])
def test_the_recipes_of_the_conditions_are_what_they_say(name):
    recipe = Path(__file__).parents[2] / "recipes" / "conditions" / f"{name}.toml"
    found, _ = load(recipe, (), {})
    condition = name.upper().replace("-", "+")
    assert switches.condition(found) == condition and switches.refusals(found) == []
    assert f"Condition {condition} " in recipe.read_text()
    assert len(recipe.read_text().splitlines()) < 60


LAUNCH = Path(__file__).parents[2] / "recipes" / "launch.sh"


def launch(tmp_path, *arguments, **environ):
    """The launcher with a ``stretto`` that only says what it was asked."""
    fake = tmp_path / "bin" / "stretto"
    fake.parent.mkdir(exist_ok=True)
    controls = " ".join(f"${control}" for control in CONTROLS)
    fake.write_text(f'#!/bin/sh\necho "$@" "{controls}"\n')
    fake.chmod(0o755)
    plain = {k: v for k, v in os.environ.items() if k not in CONTROLS}
    path = f"{fake.parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(LAUNCH), *arguments], env=plain | {"PATH": path} | environ, capture_output=True, text=True
    )


def test_the_launcher_hands_the_condition_on(tmp_path):
    done = launch(tmp_path, "r.toml", "--set", "run.dir=x y", MM_PROCESSOR_POOL_SIZE="8", HYBRID_PIPELINE_FORWARD="1")
    assert (done.returncode, done.stdout) == (0, "train r.toml --set run.dir=x y 8  1\n")
    assert launch(tmp_path, "r.toml").stdout == "train r.toml   \n"  # left to the recipe


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("value", ["yes", "", "-1", " 1", "01", "1\n"])
def test_the_launcher_refuses_what_the_options_refuse(control, value, tmp_path):
    done = launch(tmp_path, "r.toml", **{control: value})
    assert done.returncode == 2 and done.stdout == ""
    assert control in done.stderr and "expected" in done.stderr


def test_the_launcher_refuses_r_with_s_before_anything_starts(tmp_path):
    done = launch(tmp_path, "r.toml", HYBRID_REUSE_TRAIN_LOGPROBS="1", HYBRID_PIPELINE_FORWARD="1")
    assert done.returncode == 2 and done.stdout == "" and "must not be conflated" in done.stderr


def test_attention_dropout_in_the_config_of_a_loaded_model_refuses_r(tmp_path):
    save_model(tiny.family(), tiny.model(), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    told = json.loads(path.read_text())
    told["text_config"]["attention_dropout"] = 0.1
    path.write_text(json.dumps(told))
    found = examine(None, [f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}"], {CONTROL_R: "1"})
    (text,) = [p.text for p in found.problems if "attention_dropout" in p.text]
    assert "switches.logprob_reuse = true" in text and "config.json" in text and found.exit_code == 2
