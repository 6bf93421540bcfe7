"""A plan is read whole or refused whole, has one canonical text, and does not change."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.bench.plan import Contrast, Plan, Window, condition_sets, parse_window, toml_text
from stretto.bench.plan_file import changes, keep_plan, load_plan, parse_plan, read_kept_plan
from stretto.types import ConfigError

SHORT = """
name = "switches-cpu"
recipe = "recipes/digits.toml"
conditions = ["P", "P+R", "P+S", "B(c=1)"]
variants."B(c=1)" = {"actor.chunks_per_mini" = 1}
seeds = [11, 12, 13, 14]
updates = 45
warmup = 5
windows = ["5-44"]
primary = ["P+S", "B"]
contrasts = [["P+S", "B(c=1)"]]
targets_percent = {"P+R" = 39, "P+S" = 11.97}
pool_size = 1
settings.actor.lr = 1e-3
"""


def plan(text: str = SHORT) -> Plan:
    return parse_plan(tomllib.loads(text))


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        plan(text)
    return error.value.problems


def test_a_short_file_is_a_whole_plan():
    found = plan()
    assert len(SHORT.strip().splitlines()) < 15
    assert found.conditions == ("B", "P", "P+R", "P+S", "B(c=1)")
    assert found.measured == (Window(5, 44),)
    assert found.primary_contrast == Contrast("P+S", "B")
    assert [str(contrast) for contrast in found.other_contrasts] == [
        "P over B",
        "P+R over B",
        "B(c=1) over B",
        "P+S over B(c=1)",
    ]
    assert found.settings == {"actor.lr": 1e-3}
    assert (found.order, found.repetitions, found.guardrails.step_p95_ratio) == ("blocks", 1, 1.05)


def test_what_makes_a_condition_is_said_for_every_switch():
    off = {"switches.processor_pool": 0, "switches.logprob_reuse": False, "switches.chunk_overlap": False}
    assert condition_sets(plan(), "B") == off
    assert condition_sets(plan(), "P+S") == off | {"switches.processor_pool": 1, "switches.chunk_overlap": True}
    assert condition_sets(plan(), "B(c=1)") == off | {"actor.chunks_per_mini": 1}


def test_a_factorial_is_every_combination_with_one_letter_an_entry_at_most():
    text = SHORT.replace('conditions = ["P", "P+R", "P+S", "B(c=1)"]', 'factorial = [["P"], ["R", "S"]]')
    text = text.replace('variants."B(c=1)"', 'conditions = ["B(c=1)"]\nvariants."B(c=1)"')
    assert plan(text).conditions == ("B", "R", "S", "P", "P+R", "P+S", "B(c=1)")


def test_the_name_is_the_sha256_of_the_canonical_text_which_reads_as_the_same_plan():
    found = plan()
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    again = plan(found.text)
    assert again == found and again.text == found.text


def test_one_plan_written_in_two_ways_has_one_name():
    lines = SHORT.strip().splitlines()
    other = "\n".join(reversed([line for line in lines if "settings" not in line])) + '\n[settings]\n"actor.lr" = 0.001'
    other = (
        other.replace('"P", "P+R"', '"B", "P", "R+P"').replace("39,", "39.0,") + "\n[guardrails]\nstep_p95_ratio = 1.05"
    )
    assert plan(other).sha256 == plan().sha256


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ('"switches-cpu"', '"other"', "name"),
        ("digits.toml", "files.toml", "recipe"),
        ('"P", "P+R"', '"P+R", "P"', "conditions"),
        ('"actor.chunks_per_mini" = 1', '"actor.chunks_per_mini" = 4', "variants"),
        ("13, 14", "13, 15", "seeds"),
        ("updates = 45", "updates = 46", "updates"),
        ("warmup = 5", "warmup = 4", "warmup"),
        ("5-44", "6-44", "windows"),
        ('["P+S", "B"]', '["P", "B"]', "primary"),
        ("[[", '[["P+S", "P"], [', "contrasts"),
        ("39,", "40,", "targets_percent"),
        ("pool_size = 1", "pool_size = 2", "pool_size"),
        ("1e-3", "2e-3", "settings"),
        ("pool_size = 1", "pool_size = 1\nrepetitions = 2", "repetitions"),
        ("pool_size = 1", "pool_size = 1\nguardrails.workload_percent = 2", "guardrails"),
    ],
)
def test_every_change_is_another_plan_and_is_told_with_both_values(before, after, field):
    changed = plan(SHORT.replace(before, after, 1))
    assert changed.sha256 != plan().sha256
    (line,) = changes(plan(), changed)
    assert line.startswith(f"{field}: ") and ", now " in line


TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TOML_VALUES)
def test_any_value_survives_its_canonical_text(value):
    def lists(item):
        if isinstance(item, dict):
            return {key: lists(inner) for key, inner in item.items()}
        return [lists(inner) for inner in item] if isinstance(item, tuple) else item

    read = tomllib.loads(f"value = {toml_text(value)}")["value"]
    assert read == lists(value) and type(read) is type(lists(value))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('name = "switches-cpu"', 'name = "CPU runs"', "names folders"),
        ("seeds = [11, 12, 13, 14]", "seeds = [11, 11]", "none twice"),
        ("seeds = [11, 12, 13, 14]", "seeds = []", "at least one"),
        ("seeds = [11, 12, 13, 14]", "", "seeds is not set: expected a list of integers"),
        ("seeds = [11, 12, 13, 14]", 'seeds = "11"', 'seeds = "11": expected a list of integers'),
        ("updates = 45", "updates = 0", "updates = 0: expected an integer above 0"),
        ("warmup = 5", "warm_up = 5", "warm_up: no such key; did you mean warmup?"),
        ("5-44", "5-45", "the last of 45 updates is 44"),
        ('"5-44"', '"5-20", "20-44"', "share no update"),
        ('"5-44"', '"30-44", "5-20"', "ascending"),
        ("5-44", "44-5", "is no window"),
        ("5-44", "all", "is no window"),
        ('"5-44"', "", "at least one window"),
        ('"P", "P+R"', '"P", "Q"', "letters of P, R, S"),
        ('"P", "P+R"', '"P", "P+P"', "letters of P, R, S"),
        ('"P", "P+R"', '"P", "R+S"', "R leaves no old-policy forward for S to overlap"),
        ('"P", "P+R"', '"P", 3', "conditions = "),
        ('"P", "P+R"', '"P(x)", "P+R"', 'say in [variants."P(x)"]'),
        ('"B(c=1)"]\n', '"P+R"]\n', "is in no cell"),
        ('["P+S", "B"]', '["P+S", "S"]', "primary names"),
        ('["P+S", "B"]', '["B", "P+S"]', "name it second"),
        ('["P+S", "B"]', '["P+S", "B(c=1)"]', "twice"),
        ('["P+S", "B(c=1)"]]', '["P", "B"]]', "compared with B anyway"),
        ('"P+R" = 39', '"R" = 39', "compared with B: P, P+R, P+S, B(c=1)"),
        ("actor.lr", "actor.learning_rate", "did you mean actor.lr?"),
        ("actor.lr = 1e-3", "actor.lr = nan", "finite"),
        ("actor.lr = 1e-3", "run.seed = 3", "leave it out"),
        ("actor.lr = 1e-3", "actor.chunks_per_mini = 2", "leave it to one of them"),
        ("pool_size = 1", "guardrails.step_p95 = 1", "guardrails.step_p95: no such key; did you mean step_p95_ratio?"),
        ("pool_size = 1", "guardrails.step_p95_ratio = 0.5", "expected a number of at least 1"),
        ("pool_size = 1", "guardrails = 3", "guardrails = 3: expected a table"),
        ("pool_size = 1", 'order = "pairs"', "two conditions, not 5"),
        ("pool_size = 1", 'order = "random"', '"blocks" or "pairs"'),
        ("pool_size = 1", 'factorial = ["P"]', "factorial = "),
        ('conditions = ["P", "P+R", "P+S", "B(c=1)"]', "", "nothing is compared with B"),
        ('variants."B(c=1)"', 'variants."B(.c)"', "names folders"),
        ('variants."B(c=1)"', 'variants."B(../c)"', "names folders"),
        ('variants."B(c=1)"', 'variants."B(c 1)"', "names folders"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_with_the_remedy(before, after, said):
    assert before in SHORT
    assert any(said in problem for problem in refused(SHORT.replace(before, after, 1)))


@pytest.mark.parametrize("label", ["c=1", "c=1.", "big_v1.5", "a+b,c-d"])
def test_a_label_is_a_name_of_folders(label):
    assert plan(SHORT.replace("B(c=1)", f"B({label})")).conditions[-1] == f"B({label})"


@pytest.mark.parametrize(
    "option",
    [
        *("model.dtype = 'bfloat16'", "data.digits = 3", "cluster.actor_cores = [0]", "staleness.max = 2"),
        *("staleness.mode = 'bounded'", "run.determinism = 'fast'", "rollout.max_response_tokens = 4"),
        *("rollout.prompts_per_partition = 8", "rollout.n_samples_per_prompt = 2", "rollout.temperature = 0.5"),
    ],
)
def test_a_variant_does_other_work_only_where_all_cells_do(option):
    name, _, value = option.partition(" = ")
    (problem,) = refused(SHORT.replace('"actor.chunks_per_mini" = 1', f'"{name}" = {value}'))
    assert problem.startswith(f'variants."B(c=1)": {name}: a variant changes how the same work is done, not the work')
    assert name in plan(SHORT.replace("actor.lr = 1e-3", option)).settings


def test_everything_that_is_wrong_is_said_at_once():
    text = SHORT.replace("5-44", "5-60").replace("13, 14", "13, 13").replace("actor.lr", "actor.rl")
    assert len(refused(text)) == 3


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "digits.toml").write_text("[run]\n")
    (tmp_path / "short.toml").write_text(SHORT)
    return tmp_path


def test_a_plan_holds_the_hash_of_its_recipe_and_is_kept_under_its_own(root):
    found = load_plan(root / "short.toml", root)
    assert found.recipe_sha256 == hashlib.sha256(b"[run]\n").hexdigest()
    path = keep_plan(found, root / "campaign")
    assert path.name == f"{hashlib.sha256(path.read_bytes()).hexdigest()}.plan.toml"
    assert keep_plan(found, root / "campaign") == path
    assert read_kept_plan(root / "campaign") == found == load_plan(path, root)


def test_a_changed_plan_is_refused_with_both_values(root):
    keep_plan(load_plan(root / "short.toml", root), root / "campaign")
    (root / "short.toml").write_text(SHORT.replace("5-44", "25-44"))
    with pytest.raises(ConfigError, match=r'windows: \["5-44"\], now \["25-44"\]'):
        keep_plan(load_plan(root / "short.toml", root), root / "campaign")


def test_a_changed_recipe_is_a_changed_plan(root):
    path = keep_plan(load_plan(root / "short.toml", root), root / "campaign")
    (root / "recipes" / "digits.toml").write_text("[run]\nupdates = 2\n")
    with pytest.raises(ConfigError, match="recipe_sha256"):
        keep_plan(load_plan(root / "short.toml", root), root / "campaign")
    with pytest.raises(ConfigError, match="restore it"):
        load_plan(path, root)
    assert read_kept_plan(root / "campaign").recipe == "recipes/digits.toml"  # analysis needs no recipe


def test_a_kept_file_that_was_edited_is_refused(root):
    path = keep_plan(load_plan(root / "short.toml", root), root / "campaign")
    path.write_text(path.read_text().replace("5-44", "6-44"))
    with pytest.raises(ConfigError, match="was changed after it was written"):
        read_kept_plan(root / "campaign")


def test_a_kept_file_of_a_version_that_writes_another_text_is_refused_as_such(root):
    keep_plan(load_plan(root / "short.toml", root), root / "campaign")
    (path,) = (root / "campaign").iterdir()
    text = path.read_text().replace("pool_size = 1\n", "")  # a field that version did not have
    path.unlink()
    name = hashlib.sha256(text.encode()).hexdigest()
    (root / "campaign" / f"{name}.plan.toml").write_text(text)
    with pytest.raises(ConfigError, match="was written by another version of the package"):
        read_kept_plan(root / "campaign")


@pytest.mark.parametrize("files", [[], ["a.plan.toml", "b.plan.toml"]])
def test_a_folder_holds_one_plan(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="exactly one plan"):
        read_kept_plan(tmp_path)


def test_files_that_are_no_plan_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"short.toml cannot be read"):
        load_plan(tmp_path / "short.toml")
    (tmp_path / "short.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_plan(tmp_path / "short.toml")
    (tmp_path / "short.toml").write_text(SHORT)
    with pytest.raises(ConfigError, match=r"digits.toml. cannot be read"):
        load_plan(tmp_path / "short.toml", tmp_path)


def test_a_window_counts_both_ends():
    assert parse_window("10-59") == Window(10, 59) and Window(10, 59).updates == 50 and str(Window(0, 0)) == "0-0"
