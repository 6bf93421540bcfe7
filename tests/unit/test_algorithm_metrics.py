"""Metrics of an update under each option, and of several updates as one line."""

from __future__ import annotations

import math

import algorithm_case
import pytest

from stretto.actor.objective import merge_updates, step_metrics
from stretto.actor.trainer import StepStats
from stretto.observe.names import METRICS


def metrics(config, seed: int = 0, lengths=(3, 4), trained=(True, True)) -> dict[str, float]:
    case = algorithm_case.responses(seed, lengths, trained)
    loss, totals = case.run(config, range(len(lengths)), entropy=0.5)
    normaliser = 7 if any(trained) else 0
    return step_metrics(StepStats(True, "", loss, 1.0, 0.1, normaliser, totals), config)


def test_metrics_are_means_over_the_tokens_that_carry_loss():
    found = metrics(algorithm_case.config(importance_correction="none"), lengths=(3, 4, 5), trained=(True, True, False))
    assert found["loss_tokens"] == 7
    assert found["entropy"] == pytest.approx(0.5)
    assert not {"ref_kl", "teacher_kl", "is_weight_mean"} & found.keys()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"importance_correction": "tis"}, {"is_weight_mean", "is_clipped_fraction"}),
        ({"importance_correction": "mis"}, {"is_weight_mean", "is_masked_fraction"}),
        ({"kl_loss_coef": 0.1}, {"ref_kl"}),
        ({"kl_reward_coef": 0.1}, {"ref_kl"}),
        ({"teacher": "some/model"}, {"teacher_kl"}),
    ],
)
def test_an_option_has_its_metrics_and_all_of_them_are_listed(options, names):
    found = metrics(algorithm_case.config(**({"importance_correction": "none"} | options)))
    plain = metrics(algorithm_case.config(importance_correction="none"))
    assert names <= found.keys() - plain.keys() and found.keys() <= METRICS.keys()


def test_the_kl_of_the_reward_is_measured_by_the_estimator_of_the_reward():
    case = algorithm_case.responses(0, [3, 4])
    mean = sum(float((n.detach() - r).sum()) for n, r in zip(case.new, case.ref, strict=True)) / 7
    assert metrics(algorithm_case.config(kl_reward_coef=0.1))["ref_kl"] == pytest.approx(mean, rel=1e-6)


def test_nothing_is_divided_where_no_token_carried_loss():
    found = metrics(algorithm_case.config(), trained=(False, False))
    assert found == {"lr": 0.1, "loss_tokens": 0.0, "update_skipped": 0.0}


def test_updates_of_a_partition_are_merged_by_what_their_metrics_are():
    first = {"lr": 0.1, "loss_tokens": 10.0, "update_skipped": 0.0, "loss": 1.0, "ratio_deviation_max": 0.5}
    second = {"lr": 0.2, "loss_tokens": 5.0, "update_skipped": 1.0, "ratio_deviation_max": 0.25}
    third = {"lr": 0.3, "loss_tokens": 1.0, "update_skipped": 1.0, "loss": 2.0, "ratio_deviation_max": 0.0}
    steps = [{"optimizer_step": 1.0, "skipped_updates": 0.0}, {"optimizer_step": 1.0, "skipped_updates": 2.0}]
    merged = merge_updates([first | steps[0], second, third | steps[1]])
    assert merged == {
        "lr": 0.3,
        "loss_tokens": 16.0,
        "update_skipped": 2.0,
        "loss": 1.5,
        "ratio_deviation_max": 0.5,
        "optimizer_step": 1.0,
        "skipped_updates": 2.0,
    }
    assert merge_updates([first]) == first
    for order in ([first, {"ratio_deviation_max": math.nan}], [{"ratio_deviation_max": math.nan}, first]):
        assert math.isnan(merge_updates(order)["ratio_deviation_max"])
