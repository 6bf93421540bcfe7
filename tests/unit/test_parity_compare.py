"""What is required of two runs: topologies, bounded switches, control pairs, fast runs; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import parity_case
import pytest
from parity_case import copy, edit_columns, edit_line, edit_session, nudge

from stretto.observe.dump import write_dump
from stretto.observe.raw import raw_path, tensors_path
from stretto.parity import table
from stretto.parity.compare import compare
from stretto.parity.rows import symmetric
from stretto.parity.verdict import Incomparable, Verdict
from stretto.types import StrettoError

UPDATES = 4
INPUTS = (
    "prompt tokens",
    "response tokens",
    "response lengths",
    "loss masks",
    "raw rewards",
    "rewards",
    "failed samples",
    "truncation",
    "multimodal tensors",
    "policy versions",
    "rollout log-probs",
    "advantages",
)
COMPUTED = (
    "old-policy log-probs",
    "training log-probs",
    "loss",
    "gradient norm",
    "gradients",
    "parameters",
    "optimizer state",
)
R_BOUNDED = {
    "switches": {
        "condition": "P+R",
        "processor_pool": {"numerics": "exact"},
        "logprob_reuse": {"numerics": "bounded", "tolerance": 1e-3, "why": "the inference graph rounds otherwise"},
    },
    "config": {"switches": {"processor_pool": 2, "logprob_reuse": True}},
}
FAST: dict[str, Any] = {"config": {"run": {"determinism": "fast"}}}
REPLAY: dict[str, Any] = {"config": {"seams": {"replay": "a/recording"}}}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Partition k was sampled by version max(0, k - 1), as staleness 1 says."""
    folder = parity_case.write_run(tmp_path_factory.mktemp("parity") / "a", updates=UPDATES)
    for k in range(UPDATES):
        edit_columns(
            folder, k, lambda c, k=k: [c[name].fill(max(0, k - 1)) for name in ("version_start", "version_end")]
        )
    return folder


@pytest.fixture
def other(run, tmp_path) -> Path:
    return copy(run, tmp_path / "b")


def add(run: Path, column: str, amount: float, update: int, at: int = 0) -> None:
    def change(columns: parity_case.Columns) -> None:
        columns[column][at] += amount

    edit_columns(run, update, change)


def part(run: Path, update: int) -> Path:
    """Parameters differ from the end of an update on, as a run that rounds otherwise has it."""
    for k in range(update, UPDATES):
        edit_line(run, "fingerprints.jsonl", k, lambda line, k=k: line.update(parameters=f"{k:016x}"))
    return run


def statuses(verdict: Verdict, *names: str) -> set[str]:
    return {verdict[name].status for name in names}


# Topologies --------------------------------------------------------------------------------------------------------


def test_across_topologies_inputs_stay_exact_and_the_rest_is_measured(run, other):
    edit_session(other, config={"actor": {"data_parallel": 4}})
    add(other, "train_logprobs", 3e-6, update=0, at=2)
    add(other, "rank", 1, update=0, at=2)
    verdict = compare(run, part(other, 0))
    assert verdict.topology == {"actor.data_parallel": (1, 4)}
    assert verdict.exit_code == 0 and statuses(verdict, *INPUTS) == {"exact"}
    row = verdict["training log-probs"]
    assert (row.status, row.required) == ("distance", "distance")
    assert row.distance.largest == pytest.approx(3e-6, rel=0.1) and row.distance.differing == 1
    assert verdict["microbatch schedule"].status == "distance"
    assert "actor.data_parallel 1 against 4" in table.text(verdict)


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"model": {"dtype": "bfloat16"}}},
        {"config": {"actor": {"layout": "padded"}}},
        {"config": {"actor": {"chunks_per_mini": 4}}},
        {"config": {"actor": {"max_tokens_per_microbatch": 128}}},
        {"determinism": {"actor": {"device": "cuda"}}, "hardware": {"gpus": [{"name": "a GPU"}]}},
        {"determinism": {"actor": {"torch_threads": 4}}},
        {"versions": {"torch": "2.14.0"}},
        {"hardware": {"cpu": "another CPU"}},
    ],
)
def test_what_shapes_arithmetic_is_topology(run, other, change):
    verdict = compare(run, edit_session(other, **change))
    assert len(verdict.topology) == 1 or "device" in verdict.topology
    assert verdict["parameters"].required == "distance" and verdict["prompt tokens"].required == "exact"


def test_the_same_layout_by_another_name_is_one_topology(run, other):
    assert not compare(run, edit_session(other, config={"actor": {"layout": "shared"}})).topology


def test_what_is_finite_in_one_run_alone_fails_at_any_distance(run, other, tmp_path):
    """Another topology excuses rounding, and no rounding makes a NaN."""
    edit_session(other, config={"actor": {"data_parallel": 4}})
    edit_columns(other, 1, lambda c: c["train_logprobs"].__setitem__(2, 0.25))
    edit_columns(other, 2, lambda c: c["train_logprobs"].__setitem__(5, np.nan))
    edit_line(other, "metrics.jsonl", 3, lambda line: line.update(grad_norm=None))
    part(other, 0)
    verdict = compare(run, other)
    row = verdict["training log-probs"]
    assert (row.status, row.required, row.first.update, row.first.sample) == ("differs", "distance", 2, 1)
    assert "against nan" in table.explain(row) and verdict["gradient norm"].status == "differs"
    assert verdict.exit_code == 1
    one = copy(run, tmp_path / "one")
    for folder in (one, other):
        edit_columns(folder, 2, lambda c: c["train_logprobs"].__setitem__(5, np.nan))
        edit_line(folder, "metrics.jsonl", 3, lambda line: line.update(grad_norm=None))
    assert compare(one, other).exit_code == 0


def test_dumps_say_how_far_apart_gradients_and_parameters_are(run, other, tmp_path):
    one = copy(run, tmp_path / "one")
    for folder, last in ((one, 4.0), (other, 4.5)):
        values = np.array([3.0, last], np.float32)
        write_dump(folder, 0, 0, 1, {"gradients.w": values, "parameters.w": np.ones(2, np.float32)})
    assert compare(one, other).notes == ()
    edit_session(other, config={"actor": {"data_parallel": 4}})
    (note,) = compare(one, part(other, 0)).notes
    assert note == "dumps of update 0: relative l2 distance of gradients 0.1, of parameters 0"
    write_dump(other, 0, 0, 1, {"gradients.v": values})
    assert compare(one, other).notes == ("dumps of update 0: of other tensors",)
    write_dump(other, 0, 0, 2, {"gradients.v": values})
    assert "holds no whole dump of update 0" in compare(one, other).notes[0]


def test_a_fault_in_the_inputs_fails_across_topologies(run, other):
    edit_session(other, config={"actor": {"data_parallel": 4}})
    add(other, "raw_rewards", 1e-6, update=0, at=3)
    verdict = compare(run, part(other, 0))
    assert verdict.first.quantity == "raw rewards" and verdict.exit_code == 1


def test_live_rollouts_of_other_weights_are_not_held_to_be_equal(run, other):
    """Parameters part at update 1, so version 2 has other weights, which sampled partition 3."""
    edit_session(other, config={"actor": {"data_parallel": 4}})
    add(other, "rollout_logprobs", 0.5, update=3)
    part(other, 1)
    verdict = compare(run, other)
    row = verdict["rollout log-probs"]
    assert row.required == "exact to update 2, then distance" and row.status == "distance"
    assert row.distance.differing == 0 and row.later.differing == 1 and row.later.largest == pytest.approx(0.5)
    assert verdict["prompt tokens"].required == "exact"
    add(other, "rollout_logprobs", 0.5, update=2)
    assert compare(run, other)["rollout log-probs"].status == "differs"


def test_replayed_rollouts_are_equal_whatever_the_weights(run, other, tmp_path):
    one = edit_session(copy(run, tmp_path / "one"), **REPLAY)
    edit_session(other, config={"actor": {"data_parallel": 4}, **REPLAY["config"]})
    add(other, "rollout_logprobs", 0.5, update=3)
    verdict = compare(one, part(other, 1))
    row = verdict["rollout log-probs"]
    assert (row.required, row.status, row.first.update, row.first.sample) == ("exact", "differs", 3, 0)


# Bounded switches --------------------------------------------------------------------------------------------------


def test_a_bounded_switch_has_its_tolerance_while_parameters_are_equal(run, other):
    edit_session(other, **R_BOUNDED)
    add(other, "old_logprobs", 9e-4, update=0, at=4)
    add(other, "old_logprobs", 0.5, update=1, at=4)
    verdict = compare(run, part(other, 0))
    row = verdict["old-policy log-probs"]
    assert (row.status, row.required) == ("within", "<= 0.001 to update 0, then distance")
    assert row.distance.largest == pytest.approx(9e-4, rel=1e-3) and row.later.largest == pytest.approx(0.5)
    assert (row.first.sample, row.first.token) == (1, 1)
    assert verdict.exit_code == 0 and statuses(verdict, *INPUTS, "microbatch schedule") == {"exact"}
    assert any("the inference graph rounds otherwise" in note for note in verdict.notes)
    add(other, "old_logprobs", 2e-4, update=0, at=4)
    verdict = compare(run, other)
    assert verdict["old-policy log-probs"].status == "differs" and verdict.exit_code == 1


def test_every_update_that_starts_from_equal_parameters_is_bounded(run, other):
    edit_session(other, **R_BOUNDED)
    add(other, "train_logprobs", 0.1, update=2)
    assert compare(run, part(other, 1))["training log-probs"].status == "distance"
    assert compare(run, part(copy(run, other.parent / "c"), 2)).exit_code == 1  # exact switches alone: not a bit
    later = edit_session(copy(run, other.parent / "d"), **R_BOUNDED)
    add(later, "train_logprobs", 0.1, update=2)
    assert compare(run, part(later, 2))["training log-probs"].status == "differs"


def test_reuse_leaves_the_training_forward_as_it_is(run, other):
    edit_session(other, **R_BOUNDED)
    add(other, "train_logprobs", 5e-4, update=0)
    row = compare(run, part(other, 0))["training log-probs"]
    assert (row.status, row.required) == ("differs", "exact to update 0, then distance")
    edit_session(other, switches={"processor_pool": {"numerics": "bounded", "tolerance": 1e-3, "why": "so it is"}})
    assert compare(run, other)["training log-probs"].status == "within"


def test_a_bounded_switch_keeps_the_gradient_norm(run, other):
    edit_session(other, **R_BOUNDED)
    part(other, 0)

    def times(factor: float, update: int) -> None:
        edit_line(other, "metrics.jsonl", update, lambda line: line.update(grad_norm=line["grad_norm"] * factor))

    times(1.004, 0)
    times(3.0, 1)
    row = compare(run, other)["gradient norm"]
    assert (row.status, row.required) == ("within", "<= 0.005 to update 0, then distance")
    times(1.002, 0)
    assert compare(run, other)["gradient norm"].status == "differs"


@pytest.mark.parametrize("tolerance", [None, "inf"])
def test_a_switch_that_is_bounded_by_no_number_fails(run, other, tolerance):
    edit_session(other, **R_BOUNDED)
    edit_session(other, switches={"logprob_reuse": {"tolerance": tolerance}})
    verdict = compare(run, other)
    assert statuses(verdict, "old-policy log-probs", "training log-probs") == {"absent"} and verdict.exit_code == 1
    assert "logprob_reuse is bounded, and not by how much" in verdict["old-policy log-probs"].note


def test_a_switch_that_both_runs_have_excuses_nothing(run, other, tmp_path):
    one = edit_session(copy(run, tmp_path / "one"), **R_BOUNDED)
    edit_session(other, **R_BOUNDED)
    edit_columns(other, 0, lambda c: nudge(c["old_logprobs"], 4))
    assert compare(one, other)["old-policy log-probs"].status == "differs"


def test_an_exact_switch_excuses_nothing(run, other):
    edit_session(other, switches={"condition": "P", "processor_pool": {"numerics": "exact"}})
    edit_columns(other, 0, lambda c: nudge(c["old_logprobs"], 4))
    verdict = compare(run, other)
    assert verdict.b.condition == "P" and verdict["old-policy log-probs"].status == "differs"


# Control pairs and fast runs ---------------------------------------------------------------------------------------


def test_a_row_in_which_the_control_pair_differs_is_undecidable(run, other, tmp_path):
    control = copy(run, tmp_path / "control")
    add(control, "train_logprobs", 1e-6, update=3, at=1)
    add(other, "train_logprobs", 4e-6, update=2, at=1)
    verdict = compare(run, other, control)
    row = verdict["training log-probs"]
    assert row.status == "undecidable" and verdict.exit_code == 3 and verdict.first is row
    assert row.distance.largest == pytest.approx(4e-6, rel=0.1) and row.control.largest == pytest.approx(1e-6, rel=0.3)
    assert (row.distance.differing, row.control.differing) == (1, 1)
    add(other, "rewards", 1e-6, update=2)  # where the control pair is equal, a difference is one
    assert compare(run, other, control).exit_code == 1


def test_a_row_is_undecidable_even_where_the_run_itself_is_equal(run, other, tmp_path):
    control = copy(run, tmp_path / "control")
    add(control, "train_logprobs", 1e-6, update=3, at=1)
    assert compare(run, other, control)["training log-probs"].status == "undecidable"


def test_a_control_repeats_the_first_run(run, other, tmp_path):
    changes: list[dict[str, Any]] = [{"switches": {"condition": "P"}}, {"config": {"actor": {"data_parallel": 2}}}]
    for i, change in enumerate(changes):
        control = edit_session(copy(run, tmp_path / f"control-{i}"), **change)
        with pytest.raises(Incomparable, match="is no control of"):
            compare(run, other, control)


def test_a_run_is_not_held_against_itself(run, other, tmp_path):
    (tmp_path / "link").symlink_to(run)
    for arguments in ((run, run), (run, tmp_path / "link"), (run, other, run)):
        with pytest.raises(Incomparable, match="are one folder"):
            compare(*arguments)
    assert compare(run, other, other).exit_code == 0  # the control pair itself, as a row of a check


def test_a_replay_is_no_control_of_a_live_run(run, other, tmp_path):
    control = edit_session(copy(run, tmp_path / "control"), **REPLAY)
    with pytest.raises(Incomparable, match="replay False against True"):
        compare(run, other, control)
    replayed = edit_session(copy(run, tmp_path / "replayed"), **REPLAY)
    assert compare(replayed, other, control).exit_code == 0


def test_a_fast_run_is_measured_against_the_control_pair(run, other, tmp_path):
    one, control = (edit_session(copy(run, tmp_path / name), **FAST) for name in ("one", "control"))
    edit_session(other, **FAST)
    add(control, "train_logprobs", 4e-6, update=1)
    add(other, "train_logprobs", 2e-6, update=1)
    for folder in (control, other):
        add(folder, "response_ids", 1, update=1)
    verdict = compare(one, other, control)
    assert verdict.exit_code == 0
    row = verdict["training log-probs"]
    assert row.status == "distance" and row.control.largest > row.distance.largest > 0
    assert verdict["response tokens"].status == "distance" and verdict["prompt tokens"].required == "exact"
    assert compare(one, control, control).exit_code == 0
    add(other, "response_ids", 1, update=2)
    add(other, "train_logprobs", 8e-6, update=3)
    add(other, "rewards", 1e-9, update=3)  # where the control pair is equal
    verdict = compare(one, other, control)
    assert statuses(verdict, "response tokens", "training log-probs", "rewards") == {"undecidable"}
    assert verdict.exit_code == 3 and not verdict.failed
    assert "farther apart than the control pair" in table.explain(verdict["rewards"])
    assert compare(one, other).exit_code == 0  # no measure


def test_bounded_staleness_lets_timing_say_who_generates(run, other, tmp_path):
    bounded: dict[str, Any] = {"config": {"staleness": {"mode": "bounded"}}}
    one = edit_session(copy(run, tmp_path / "one"), **bounded)
    edit_session(other, **bounded)
    for column in ("version_end", "response_ids"):
        add(other, column, 1, update=1)
    verdict = compare(one, other)
    assert statuses(verdict, "policy versions", "response tokens") == {"distance"} and verdict.exit_code == 0
    assert verdict["prompt tokens"].required == "exact" and "a matter of timing" in verdict.notes[0]
    for folder in (one, other):
        edit_session(folder, **REPLAY)
    assert compare(one, other)["policy versions"].status == "differs"


def test_a_fast_replay_has_the_recorded_inputs(run, other, tmp_path):
    one = edit_session(copy(run, tmp_path / "one"), config={**FAST["config"], **REPLAY["config"]})
    edit_session(other, config={**FAST["config"], **REPLAY["config"]})
    add(other, "response_ids", 1, update=1)
    verdict = compare(one, other)
    assert verdict["response tokens"].status == "differs" and verdict["parameters"].required == "distance"


# Runs that do not compare, and records that are not there ----------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"fingerprint": "f" * 16}}, "0123456789abcdef .*" + "f" * 16),
        ({"data": {"fingerprint": "d2"}}, "data: fingerprint d1 .*d2"),
        ({"config": {"run": {"seed": 7}}}, "run.seed: 0 .*7"),
        ({"config": {"actor": {"lr": 2e-3}}}, "actor.lr: 0.001 .*0.002"),
        ({"config": {"run": {"updates": 11}}}, "run.updates: 10 .*11"),
        ({"config": {"staleness": {"max": 0}}}, "staleness.max: 1 .*0"),
        ({"config": {"algorithm": {"importance_correction": "mis"}}}, "importance_correction: 'tis' .*'mis'"),
    ],
)
def test_runs_of_different_things_are_refused_with_both_values(run, other, change, said):
    with pytest.raises(Incomparable, match=said):
        compare(run, edit_session(other, **change))


def test_all_reasons_are_told_at_once(run, other):
    edit_session(other, config={"run": {"seed": 7}, "actor": {"lr": 1.0}})
    with pytest.raises(Incomparable) as error:
        compare(run, other)
    assert str(error.value).count("\n- ") == 2


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"run": {"dir": "elsewhere"}}},
        {"config": {"switches": {"processor_pool": 3}}},
        {"config": {"rollout": {"replicas": 2}}},
        {"config": {"checkpoint": {"every": 1}, "eval": {"every": 7}}},
        {"config": {"algorithm": {"importance_correction": "tis"}}},
    ],
)
def test_options_that_no_number_depends_on_may_differ(run, other, change):
    assert compare(run, edit_session(other, **change)).exit_code == 0


def test_a_replay_may_have_another_staleness_than_the_run_that_was_recorded(run, other):
    change = {"staleness": {"max": 0}, "algorithm": {"importance_correction": "tis"}, "data": {"shuffle": False}}
    assert compare(run, edit_session(other, config=change | REPLAY["config"], data={"fingerprint": "x"})).exit_code == 0


def test_a_replay_goes_with_runs_of_the_data_that_was_recorded(run, other):
    edit_session(other, data={"fingerprint": "x", "recorded": {"fingerprint": "d1"}}, **REPLAY)
    assert compare(run, other).exit_code == 0
    with pytest.raises(Incomparable, match=r"data: fingerprint d1 .*d2"):
        compare(run, edit_session(other, data={"recorded": {"fingerprint": "d2"}}))


def test_replays_of_other_recordings_are_refused(run, other, tmp_path):
    one = edit_session(copy(run, tmp_path / "one"), **REPLAY)
    with pytest.raises(Incomparable, match=r"recording: fingerprint d1 .*d2"):
        compare(one, edit_session(other, data={"fingerprint": "d2"}, **REPLAY))


def test_runs_of_other_length_compare_only_as_far_as_asked(run, tmp_path):
    short = parity_case.write_run(tmp_path / "b", updates=2)
    for k in range(2):
        edit_columns(short, k, lambda c: [c[name].fill(0) for name in ("version_start", "version_end")])
    with pytest.raises(Incomparable, match=r"4 updates in .*, 2 in .*--updates 2"):
        compare(run, short)
    verdict = compare(run, short, updates=2)
    assert verdict.updates == 2 and verdict.exit_code == 0
    with pytest.raises(Incomparable, match="3 updates asked for"):
        compare(run, short, updates=3)


@pytest.mark.parametrize(
    ("column", "quantity"),
    [("loss_mask", "loss masks"), ("truncated", "truncation"), ("old_logprobs", "old-policy log-probs")],
)
def test_what_is_not_on_record_fails(run, other, column, quantity):
    edit_columns(other, 2, lambda columns: columns.pop(column))
    verdict = compare(run, other)
    row = verdict[quantity]
    assert row.status == "absent" and verdict.exit_code == 1
    assert f"the second run has no column {column} on record at update 2" in table.text(verdict)


def test_a_row_that_is_absent_comes_before_distances_that_are_permitted(run, other):
    edit_session(other, config={"actor": {"data_parallel": 4}})
    part(other, 0)
    edit_columns(other, 2, lambda columns: columns.pop("loss_mask"))
    verdict = compare(run, other)
    assert verdict.first is verdict["loss masks"] and verdict.exit_code == 1
    assert "first absent: loss masks: the second run has no column loss_mask" in table.summary(verdict)
    add(other, "raw_rewards", 1.0, update=0)
    assert compare(run, other).first.quantity == "raw rewards"


def test_hashes_in_fingerprints_decide_where_no_column_names_what_differs(run, other):
    tensors_path(other).unlink()
    verdict = compare(run, other)
    assert verdict["parameters"].status == "exact" and verdict.exit_code == 0
    row = compare(run, part(other, 2))["parameters"]
    assert (row.status, row.first.update, row.first.parameter) == ("differs", 2, None)
    assert "no entry of raw/ says where" in table.explain(row)


def test_an_update_without_raw_values_or_metrics_is_absent(run, other):
    raw_path(other, 1).unlink()
    verdict = compare(run, other)
    assert verdict["rewards"].status == "absent" and verdict["raw rewards"].status == "exact"  # its hash is on record
    (other / "metrics.jsonl").unlink()
    assert compare(run, other)["loss"].status == "absent"


def keep(run: Path, update: int, wanted: Callable[[np.ndarray], np.ndarray]) -> None:
    """Of an update, the samples alone whose ``global_index`` is wanted."""

    def change(columns: parity_case.Columns) -> None:
        samples = wanted(columns["global_index"])
        tokens = np.repeat(samples, columns["lengths"])
        for name, values in columns.items():
            if not name.startswith("hash."):
                columns[name] = values[samples if len(values) == 12 else tokens]

    edit_columns(run, update, change)


def test_a_sample_that_one_run_alone_has_is_named(run, other):
    edit_columns(other, 1, lambda c: c["global_index"].__setitem__(6, 99))
    row = compare(run, other)["rewards"]
    assert (row.first.sample, row.first.a, row.first.b) == (6, 1.0, None)
    assert row.distance.compared == 49 and row.distance.differing == 2


@pytest.mark.parametrize("left", [11, 0])
def test_samples_that_neither_run_has_on_record_are_not_equal(run, other, tmp_path, left):
    one = copy(run, tmp_path / "one")
    for folder in (one, other):
        keep(folder, 1, lambda index: index < left)
    verdict = compare(one, other)
    names = {*INPUTS, "old-policy log-probs", "training log-probs", "microbatch schedule"}
    assert statuses(verdict, *names) == {"absent"} and verdict.exit_code == 1
    assert f"the first run has {left} of 12 samples on record at update 1" in verdict["raw rewards"].note


def test_a_column_that_is_cut_short_is_not_equal(run, other, tmp_path):
    one = copy(run, tmp_path / "one")
    for folder in (one, other):
        edit_columns(folder, 1, lambda c: c.update(old_logprobs=c["old_logprobs"][:0], truncated=c["truncated"][:5]))
    verdict = compare(one, other)
    assert statuses(verdict, "old-policy log-probs", "truncation") == {"absent"}
    assert "0 values of column old_logprobs on record at update 1, which has 42" in table.text(verdict)


def test_hashes_of_no_tensor_are_not_equal(run, other, tmp_path):
    one = copy(run, tmp_path / "one")
    for folder in (one, other):
        names = json.loads(tensors_path(folder).read_text())
        tensors_path(folder).write_text(json.dumps(names | {"gradients": []}))
        for k in range(UPDATES):
            edit_columns(folder, k, lambda c: c.update({"hash.gradients": c["hash.gradients"][:0]}))
    assert compare(one, other)["gradients"].status == "absent"


def test_values_that_are_not_numbers_are_compared_by_their_bits(run, other, tmp_path):
    one = copy(run, tmp_path / "one")
    for folder, value in ((one, np.nan), (other, np.nan)):
        edit_columns(folder, 0, lambda c, value=value: c["rollout_logprobs"].__setitem__(3, value))
    assert compare(one, other)["rollout log-probs"].status == "exact"
    edit_columns(one, 1, lambda c: c["rewards"].__setitem__(3, 0.0))
    edit_columns(other, 1, lambda c: c["rewards"].__setitem__(3, -0.0))
    row = compare(one, other)["rewards"]
    assert (row.status, row.first.sample, row.first.magnitude) == ("differs", 3, 0.0)
    assert "0.0 against -0.0" in table.explain(row)


def test_null_equals_null_and_is_said_to_show_little(run, other, tmp_path):
    one = copy(run, tmp_path / "one")
    for folder in (one, other):
        edit_line(folder, "metrics.jsonl", 2, lambda line: line.update(loss=None))
    verdict = compare(one, other)
    assert verdict["loss"].status == "exact" and verdict.exit_code == 0
    for told in (table.text(verdict), table.markdown(verdict)):
        assert "loss: not finite in either run at update 2" in told


def test_a_folder_without_a_run_is_refused(run, tmp_path):
    with pytest.raises(StrettoError, match="is no manifest of a run"):
        compare(run, tmp_path)
    (tmp_path / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    with pytest.raises(StrettoError, match="trained at least one update"):
        compare(run, tmp_path)


def test_a_run_that_did_not_finish_is_said_to_have_not(run, other):
    verdict = compare(run, edit_session(other, status="interrupted"), updates=UPDATES)
    assert verdict.exit_code == 0 and any("is interrupted, not finished" in note for note in verdict.notes)


def test_runs_that_did_not_finish_are_refused_unless_updates_are_named(run, other, tmp_path):
    one = edit_session(copy(run, tmp_path / "one"), status="failed")
    edit_session(other, status="failed")
    with pytest.raises(Incomparable) as error:
        compare(one, other)
    assert str(error.value).count("is failed, not finished; compare what both have trained with --updates 4") == 2
    assert compare(one, other, updates=2).exit_code == 0
    good = copy(run, tmp_path / "good")
    with pytest.raises(Incomparable, match="is failed, not finished"):
        compare(run, good, one)
    assert compare(run, good, one, updates=2).exit_code == 0


def resumed(run: Path, **changes: Any) -> Path:
    """Gives it a second session, with these changes."""
    path = run / "manifest.json"
    data = json.loads(path.read_text())
    data["sessions"].append(json.loads(json.dumps(data["sessions"][0])))
    path.write_text(json.dumps(data))
    return edit_session(run, **changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"switches": {"condition": "P"}}, "another switches"),
        ({"config": {"switches": {"processor_pool": 2}}}, "another switches.processor_pool: 0 in session 0, 2 in"),
        ({"config": {"run": {"determinism": "fast"}}}, "another run.determinism: 'exact' in session 0, 'fast' in"),
        ({"config": {"actor": {"data_parallel": 2}}}, "another actor.data_parallel"),
        ({"determinism": {"actor": {"device": "cuda"}}}, "another device: 'cpu' in session 0, 'cuda' in"),
        ({"determinism": {"actor": {"torch_threads": 4}}}, "another actor threads: 1 in session 0, 4 in"),
        ({"hardware": {"cpu": "another CPU"}}, "another hardware: 'a CPU'"),
        ({"versions": {"torch": "2.14.0"}}, "another torch: '2.13.0'"),
    ],
)
def test_a_run_that_was_resumed_under_something_else_is_refused(run, other, tmp_path, change, said):
    resumed(other, **change)
    with pytest.raises(Incomparable, match=said):
        compare(run, other)
    with pytest.raises(Incomparable, match=said):
        compare(other, run)
    with pytest.raises(Incomparable, match=said):
        compare(run, copy(run, tmp_path / "c"), other)


def test_a_run_that_was_resumed_as_it_was_is_not(run, other):
    resumed(other, config={"checkpoint": {"every": 1}, "run": {"dir": "moved"}, "plane": {"lease_s": 9.0}})
    assert compare(run, other).exit_code == 0
    path = other / "manifest.json"
    data = json.loads(path.read_text())
    del data["sessions"][0]["determinism"], data["sessions"][0]["switches"]  # it ended before it had found out
    path.write_text(json.dumps(data))
    assert compare(run, other).exit_code == 0


def test_the_symmetric_difference():
    assert symmetric(1.0, 1.0) == 0.0 and symmetric(0.0, 0.0) == 0.0
    assert symmetric(1.0, 3.0) == symmetric(3.0, 1.0) == 1.0
    assert symmetric(1.0, -1.0) == 2.0
