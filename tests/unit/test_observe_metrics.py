import json
import math
import time

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stretto.observe.lineage import UpdateLines, read_lines
from stretto.observe.metrics import (
    FingerprintWriter,
    MetricsWriter,
    add_means,
    read_fingerprints,
    read_metrics,
    throughput,
    weighted_mean,
)
from stretto.observe.raw import RawLog, ragged, raw_path, read_raw, read_tensor_names
from stretto.types import StrettoError

nan, inf = math.nan, math.inf


def strict(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


# Means and throughput ------------------------------------------------------------------------------------------------


def test_a_mean_over_ranks_skips_nan_and_counts_what_it_skipped():
    ranks = [{"x": weighted_mean(values)} for values in ([0.5, nan], [nan, 0.8], [0.6, 0.7])]
    mean = add_means(ranks)["x"]
    assert mean.value == pytest.approx(0.65)
    assert (mean.count, mean.nonfinite) == (4, 2)


def test_an_empty_microbatch_has_no_weight_whatever_its_value():
    mean = weighted_mean([2.0, nan, 0.5], [100, 0, 900])
    assert mean.value == pytest.approx(0.65)  # (100 * 2 + 900 * 0.5) / 1000
    assert (mean.count, mean.nonfinite) == (2, 0)


def test_a_name_that_one_rank_alone_has_is_that_ranks_mean():
    total = add_means([{"a": weighted_mean([1.0]), "b": weighted_mean([3.0])}, {"a": weighted_mean([2.0])}])
    assert (total["a"].value, total["b"].value) == (1.5, 3.0)


def test_the_mean_of_nothing_is_nan():
    assert math.isnan(weighted_mean([]).value)
    assert math.isnan(weighted_mean([inf]).value)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, nan]])
def test_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        weighted_mean([1.0, 2.0], weights)


def test_throughput_is_the_sum_of_tokens_over_the_sum_of_seconds_after_the_warm_up():
    rate = throughput([1000, 1000, 1000, 1000, 4000], [30, 30, 1, 1, 10], warmup=2)
    assert rate.per_s == 500  # 6000 / 12; the mean of the rates is 800, with the warm-up it is 111
    assert (rate.first, rate.steps, rate.tokens, rate.seconds) == (2, 3, 6000, 12)


def test_a_window_that_is_too_short_is_refused():
    with pytest.raises(StrettoError, match="warm-up of 2 leave 0"):
        throughput([1000, 1000], [1, 1], warmup=2)
    with pytest.raises(StrettoError, match="at least 40"):
        throughput([1000] * 10, [1] * 10, min_steps=40)


# metrics.jsonl -------------------------------------------------------------------------------------------------------


def test_metrics_lines_are_strict_json_with_sorted_keys_and_a_count_of_what_was_not_finite(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(
        0,
        {
            "reward_mean": np.float32(0.5),
            "loss": nan,
            "parts": [1.0, inf, {"x": -inf}],
            "tensor": torch.tensor(2.5),
            "array": np.array([1, 2]),
            "reason": "none",
            "flag": True,
        },
    )
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    row = strict(line)
    assert list(row) == sorted(row)
    assert row == {
        "update": 0,
        "reward_mean": 0.5,
        "loss": None,
        "parts": [1.0, None, {"x": None}],
        "tensor": 2.5,
        "array": [1, 2],
        "reason": "none",
        "flag": True,
        "nonfinite": 3,
    }


def test_a_resumed_run_keeps_the_surviving_lineage_once_and_moves_undone_updates_aside(tmp_path):
    for first, last, value in ((0, 5, "a"), (3, 4, "b"), (2, 6, "c")):
        metrics, fingerprints = MetricsWriter(tmp_path, first), FingerprintWriter(tmp_path, first)
        for update in range(first, last):
            metrics.write(update, {"x": value})
            fingerprints.write(update, {"parameters": value})
        metrics.close()
        fingerprints.close()
    survivors = [(0, "a"), (1, "a"), (2, "c"), (3, "c"), (4, "c"), (5, "c")]
    undone = [(3, "a"), (4, "a"), (2, "a"), (3, "b")]
    assert [(r["update"], r["x"]) for r in read_metrics(tmp_path)] == survivors
    assert [(r["update"], r["x"]) for r in read_lines(tmp_path / "metrics.undone.jsonl")] == undone
    assert [(r["update"], r["parameters"]) for r in read_fingerprints(tmp_path)] == survivors
    assert [(r["update"], r["parameters"]) for r in read_lines(tmp_path / "fingerprints.undone.jsonl")] == undone


def test_a_line_that_a_kill_cut_short_is_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 0}\n{"update": 1, "los')
    assert read_lines(path) == [{"update": 0}]
    lines = UpdateLines(path, 1)
    lines.append({"update": 1})
    lines.close()
    assert path.read_text() == '{"update": 0}\n{"update": 1}\n'


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 0}\nnonsense\n{"update": 2}\n')
    with pytest.raises(StrettoError, match="line 2"):
        UpdateLines(path, 2)


def test_every_line_is_in_the_file_before_the_next_is_written(tmp_path):
    writer = MetricsWriter(tmp_path)
    for update in range(3):
        writer.write(update, {})
        assert len(read_metrics(tmp_path)) == update + 1
    writer.close()


def board(run_dir):
    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_the_numbers_and_leaves_out_text_nulls_and_undone_steps(tmp_path):
    first = MetricsWriter(tmp_path)
    for update in range(4):
        first.write(update, {"reward_mean": update / 10, "loss": nan, "reason": "x"})
    first.close()
    time.sleep(1.1)  # readers take event files by name, which holds the second
    second = MetricsWriter(tmp_path, 2)
    second.write(2, {"reward_mean": 0.9})
    assert {"reward_mean", "nonfinite"} == set(board(tmp_path).Tags()["scalars"])  # before it is closed
    second.close()
    points = [(e.step, round(e.value, 6)) for e in board(tmp_path).Scalars("reward_mean")]
    assert points == [(0, 0.0), (1, 0.1), (2, 0.9)]


# Raw values ----------------------------------------------------------------------------------------------------------


def columns(index, lengths):
    lengths = np.array(lengths, np.int32)
    flat = np.concatenate([100 * i + np.arange(n) for i, n in zip(index, lengths, strict=True)]).astype(np.float32)
    return {
        "global_index": np.array(index, np.int64),
        "lengths": lengths,
        "rewards": np.array(index, np.float64) / 3,
        "advantages": -np.array(index, np.float32),
        "old_logprobs": flat,
    }


def test_raw_values_of_all_ranks_come_back_bit_for_bit_sorted_by_index(tmp_path):
    log = RawLog(tmp_path)
    log.write(12, columns([4, 0, 3], [2, 3, 0]), columns([2, 1], [1, 4]))
    assert raw_path(tmp_path, 12).name == "update_000012.safetensors"
    found, expected = read_raw(tmp_path, 12), columns([0, 1, 2, 3, 4], [3, 4, 1, 0, 2])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    rows = ragged(found["old_logprobs"], found["lengths"])
    assert [row.tolist() for row in rows] == [[0, 1, 2], [100, 101, 102, 103], [200], [], [400, 401]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_index": np.array([1, 1], np.int64)}, "global_index 1 occurs twice"),
        ({"rewards": np.zeros(3)}, r"column rewards has shape \(3,\), not \(2,\)"),
        ({"old_logprobs": np.zeros(4, np.float32)}, r"column old_logprobs has shape \(4,\), not \(5,\)"),
    ],
)
def test_raw_values_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    with pytest.raises(StrettoError, match=f"update 7: {message}"):
        RawLog(tmp_path).write(7, columns([0, 1], [2, 3]) | change)


def test_raw_values_of_undone_updates_move_aside(tmp_path):
    log = RawLog(tmp_path)
    for update in range(3):
        log.write(update, columns([0], [update + 1]))
    RawLog(tmp_path, 1)
    assert read_raw(tmp_path, 0)["lengths"].tolist() == [1]
    with pytest.raises(StrettoError, match="update 1"):
        read_raw(tmp_path, 1)
    assert sorted(p.name for p in (tmp_path / "raw" / "undone").iterdir()) == [
        "update_000001.safetensors",
        "update_000002.safetensors",
    ]


def test_hashes_of_tensors_are_named_once_and_must_keep_their_names(tmp_path):
    log = RawLog(tmp_path)
    hashes = {"parameters": {"b": 2**64 - 1, "a": 7}, "optimizer": {}}
    log.write(0, columns([1], [2]), columns([0], [3]), hashes=hashes)
    found = read_raw(tmp_path, 0)
    assert found["hash.parameters"].dtype == np.uint64 and found["hash.parameters"].tolist() == [2**64 - 1, 7]
    assert found["hash.optimizer"].tolist() == [] and found["global_index"].tolist() == [0, 1]
    assert json.loads((tmp_path / "raw/tensors.json").read_text()) == read_tensor_names(tmp_path)
    assert read_tensor_names(tmp_path) == {"parameters": ["b", "a"], "optimizer": []}
    resumed = RawLog(tmp_path, 0)  # update 0 is undone; what its columns mean is not
    resumed.write(0, columns([0], [1]), hashes=hashes)
    with pytest.raises(StrettoError, match=r"tensors\.json names other tensors"):
        resumed.write(1, columns([0], [1]), hashes={"parameters": {"a": 7, "b": 1}, "optimizer": {}})


def test_a_run_without_names_of_tensors_says_so(tmp_path):
    RawLog(tmp_path).write(0, columns([0], [1]))
    with pytest.raises(StrettoError, match="no names of tensors"):
        read_tensor_names(tmp_path)


def test_raw_values_of_512_samples_of_8_tokens_are_written_within_milliseconds(tmp_path):
    log, values = RawLog(tmp_path), columns(range(512), [8] * 512)
    best = math.inf
    for update in range(10):  # the best of a few: the machine is shared
        start = time.perf_counter()
        log.write(update, values)
        best = min(best, time.perf_counter() - start)
    assert best < 0.005
