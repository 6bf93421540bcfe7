"""The curves of several runs, drawn over one another. Needs matplotlib (extra ``plots``)."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.types import StrettoError

PANELS = (
    ("loss", "loss"),
    ("reward_mean", "reward"),
    ("grad_norm", "gradient norm"),
    ("ppo_kl_k1", "PPO-KL (k1, nats)"),
    ("response_length_mean", "response length (tokens)"),
    ("rollout_kl_k3", "KL of rollout and old policy (k3, nats)"),
)
"""Metrics, and what their panels are called."""
COLOURS = ("#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#E69F00", "#0072B2")
"""Okabe and Ito's, which colour-blind people can tell apart; the last line is black."""
DPI = 120


@dataclass(frozen=True)
class Curve:
    """One metric of one run, by partition: ``values`` [N] float64, NaN where the run has none."""

    run: str
    metric: str
    values: np.ndarray


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def read_curves(runs: Mapping[str, Path]) -> list[Curve]:
    """Every panel's metric of every run, by run, then by panel.

    Raises:
        StrettoError: a run has no metrics.
    """
    curves = []
    for name, folder in runs.items():
        try:
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise StrettoError(f"{folder}/metrics.jsonl cannot be read: {error}") from None
        for metric, _ in PANELS:
            values = [math.nan if row.get(metric) is None else float(row[metric]) for row in rows]
            curves.append(Curve(name, metric, np.array(values, np.float64)))
    return curves


def apart(curves: Sequence[Curve]) -> float:
    """The largest difference of any two of them at one partition; NaN where one has a value and another has none, or
    where they have different lengths.
    """
    if len({len(curve.values) for curve in curves}) != 1:
        return math.nan
    stack = np.stack([curve.values for curve in curves])
    missing = np.isnan(stack)
    if (missing.any(axis=0) != missing.all(axis=0)).any():
        return math.nan
    there = stack[:, ~missing.all(axis=0)]
    return float((there.max(axis=0) - there.min(axis=0)).max()) if there.size else 0.0


def draw(runs: Mapping[str, Path], path: Path, title: str) -> dict[str, float]:
    """Writes a PNG with a panel a metric; how far the runs are apart in each.

    Lines get thinner from run to run, so that each shows at both sides of the next where they lie on one another.
    """
    from matplotlib.figure import Figure

    curves = read_curves(runs)
    far = {metric: apart([curve for curve in curves if curve.metric == metric]) for metric, _ in PANELS}
    figure = Figure(figsize=(13, 7), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    for axes, (metric, label) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for number, name in enumerate(runs):
            (curve,) = (c for c in curves if c.run == name and c.metric == metric)
            last = number == len(runs) - 1
            axes.plot(
                np.arange(1, len(curve.values) + 1),
                curve.values,
                color="black" if last else COLOURS[number % len(COLOURS)],
                linewidth=1.2 + 2.0 * (len(runs) - 1 - number),
                solid_capstyle="round",
                marker="o" if len(curve.values) == 1 else "",
                label=name,
            )
        axes.set_title(f"{label}\n{apart_text(far[metric])}", fontsize=10)
        axes.set_xlabel("partition")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    figure.savefig(path, format="png")
    return far


def apart_text(difference: float) -> str:
    if math.isnan(difference):
        return "not all runs have all values"
    return "all runs the same" if difference == 0 else f"up to {difference:.3g} apart"
