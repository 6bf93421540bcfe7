"""What two runs owe each other: whether they compare at all, and what each quantity must be at each update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.parity.folder import RunFolder
from stretto.parity.rows import Origin
from stretto.parity.verdict import Incomparable

FREE = (
    "run.dir",
    "run.determinism",  # says what may be promised, see Terms
    "plane.",
    "checkpoint.",
    "eval.",
    "cluster.",
    "sft.",
    "switches.",
    "seams.",
    "reward.workers",
    "reward.timeout_s",
    "reward.max_failed_fraction",
    "rollout.replicas",
    "rollout.max_engine_restarts",
    "rollout.engine_timeout_s",
    "rollout.servers",
    "rollout.weight_transfer",
    "rollout.logprob_gap_alarm",
)
"""Options that no number depends on."""
FREE_OF_A_RECORDING = (
    "data.",
    "reward.",
    "staleness.",
    "rollout.groups_per_decode_batch",
    "rollout.refill_rounds",
    "rollout.stop",
)
"""Options that made what a recording holds; a replay does not ask them."""
TOPOLOGY = (
    "actor.data_parallel",
    "actor.chunks_per_mini",
    "actor.max_tokens_per_microbatch",
    "actor.max_patches_per_microbatch",
    "actor.layout",
    "actor.gradient_checkpointing",
    "model.dtype",
    "model.attention",
)
"""Options that shape the arithmetic: across them numbers differ by rounding."""
ROLLOUT_TOPOLOGY = ("rollout.groups_per_decode_batch",)
"""Options that shape the arithmetic of rollouts, which live runs make."""


def require_comparable(a: RunFolder, b: RunFolder, updates: int | None) -> int:
    """How many updates to compare. Raises Incomparable with every reason why these runs are not held together."""
    reasons = list(_reasons(a, b))
    lengths = (a.updates, b.updates)
    if updates is None and a.updates != b.updates:
        reasons.append(
            f"length: {a.updates} updates in {a.path}, {b.updates} in {b.path}; compare the first "
            f"{min(lengths)} of both with --updates {min(lengths)}"
        )
    if updates is None:
        least = f"; compare what both have trained with --updates {min(lengths)}"
        reasons += [f"{reason}{least}" for run in (a, b) if (reason := unfinished(run))]
    elif not 1 <= updates <= min(lengths):
        reasons.append(f"length: {updates} updates asked for, {a.updates} in {a.path}, {b.updates} in {b.path}")
    if reasons:
        raise Incomparable("these runs do not compare:\n" + "\n".join(f"- {reason}" for reason in reasons))
    return updates or a.updates


def unfinished(run: RunFolder) -> str:
    """That a run did not train to its end, which two runs that failed alike would hide; empty where it did."""
    status = run.session.get("status")
    return "" if status == "finished" else f"{run.path} is {status}, not finished"


def _reasons(a: RunFolder, b: RunFolder) -> Iterator[str]:
    for run in (a, b):
        yield from changed(run)
    free = FREE + TOPOLOGY + ROLLOUT_TOPOLOGY + (FREE_OF_A_RECORDING if a.replay or b.replay else ())
    models = _model(a), _model(b)
    if None not in models:
        free += ("model.path",)
        if models[0] != models[1]:
            yield f"model: version-0 parameters {models[0]} in {a.path}, {models[1]} in {b.path}"
    x, y = _options(a), _options(b)
    for name in x:
        if x[name] != y[name] and not _among(name, free):
            yield f"{name}: {x[name]!r} in {a.path}, {y[name]!r} in {b.path}"
    what = "recording" if a.replay and b.replay else "data"
    prints = [_data(run, recorded=a.replay != b.replay) for run in (a, b)]
    if None not in prints and prints[0] != prints[1]:
        yield f"{what}: fingerprint {prints[0]} in {a.path}, {prints[1]} in {b.path}"


def _among(name: str, options: tuple[str, ...]) -> bool:
    return any(name == option or (option.endswith(".") and name.startswith(option)) for option in options)


FREE_OF_A_SESSION = tuple(name for name in FREE if name not in ("run.determinism", "switches."))
"""Options that may change where a run is resumed."""


def changed(run: RunFolder) -> Iterator[str]:
    """What the sessions of a resumed run differ in, and is read of the last alone: the others would pass for it."""
    *earlier, last = map(_facts_of_session, run.sessions)
    for i, session in enumerate(earlier):
        for name in sorted(session.keys() & last.keys()):
            if session[name] != last[name]:
                yield (
                    f"{run.path} was resumed under another {name}: {session[name]!r} in session {i}, {last[name]!r} in "
                    "the last; a run that was not is needed"
                )


def _facts_of_session(session: Mapping[str, Any]) -> dict[str, Any]:
    """What of a session decides numbers, by name; without what it ended too early to find out."""
    found = {name: value for name, value in _flat(session.get("config", {})) if not _among(name, FREE_OF_A_SESSION)}
    if "switches" in session:
        found["switches"] = session["switches"]
    if "actor" in session.get("determinism", {}):
        found |= {"engine threads": _engine_threads(session), **_machine(session)}
    return {name: value for name, value in found.items() if value is not None}


def _data(run: RunFolder, *, recorded: bool) -> Any:
    """The fingerprint of what it trained on; with ``recorded`` a replay gives that of the data it was recorded from."""
    data = run.session.get("data", {})
    if recorded and run.replay:
        data = data.get("recorded") or {}
    return data.get("fingerprint")


def _model(run: RunFolder) -> str | None:
    """The fingerprint of its parameters before any training."""
    model = run.sessions[0].get("model", {})
    found = model.get("fingerprint") or model.get("parameters")
    return None if found is None else str(found)


def _options(run: RunFolder) -> dict[str, Any]:
    """Every option by its dotted name, ``auto`` resolved."""
    config = run.config
    options = dict(_flat(config.model_dump()))
    options["algorithm.importance_correction"] = config.importance_correction
    options["actor.layout"] = config.actor.layout_on(_device(run.session))
    return options


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and prefix == "":
            yield from _flat(value, f"{name}.")
        else:
            yield f"{prefix}{name}", value


def _device(session: Mapping[str, Any]) -> str:
    return str(session.get("determinism", {}).get("actor", {}).get("device", "cpu"))


def _machine(session: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes arithmetic besides options."""
    actor = session.get("determinism", {}).get("actor", {})
    rank = actor.get("ranks", [actor])[0]
    hardware, versions = session.get("hardware", {}), session.get("versions", {})
    device = _device(session)
    return {
        "device": device,
        "actor threads": rank.get("torch_threads"),
        "hardware": hardware.get("cpu") if device == "cpu" else [gpu.get("name") for gpu in hardware.get("gpus", [])],
        "torch": versions.get("torch"),
        "transformers": versions.get("transformers"),
    }


def _engine_threads(session: Mapping[str, Any]) -> Any:
    engines = session.get("determinism", {}).get("rollout", {}).get("engines") or [{}]
    return engines[0].get("torch_threads")


def topology(a: RunFolder, b: RunFolder) -> dict[str, tuple[Any, Any]]:
    """What shapes the arithmetic of the actor, and differs."""
    x = {name: _options(a)[name] for name in TOPOLOGY} | _machine(a.session)
    y = {name: _options(b)[name] for name in TOPOLOGY} | _machine(b.session)
    return {name: (x[name], y[name]) for name in x if x[name] != y[name]}


def rollout_topology(a: RunFolder, b: RunFolder) -> dict[str, tuple[Any, Any]]:
    """What shapes the arithmetic of rollouts, and differs; nothing where one of the runs trains on a recording."""
    if a.replay or b.replay:
        return {}
    x = {name: _options(a)[name] for name in ROLLOUT_TOPOLOGY} | {"engine threads": _engine_threads(a.session)}
    y = {name: _options(b)[name] for name in ROLLOUT_TOPOLOGY} | {"engine threads": _engine_threads(b.session)}
    return {name: (x[name], y[name]) for name in x if x[name] != y[name]}


GRADIENT_NORM = 5e-3
"""Symmetric relative difference of gradient norms at equal parameters under a bounded switch: what bfloat16's
rounding explains."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is required of two runs.

    updates    that are compared
    trained    tolerance of log-probs: 0.0 where every bit must agree, in all that is trained; infinite: distances alone
    reused     whether training log-probs are exact in spite of ``trained``, which then is of old-policy ones alone
    undeclared why nothing can be required of log-probs, where a switch is bounded by no number
    rollouts   whether rollouts from equal weights must be equal
    judged     whether advantages follow from the rollouts alone, by the same arithmetic
    apart      the first update after which the runs hold different parameters; ``updates`` where there is none
    recorded   whether rollouts come from a recording, whatever the weights
    refilled   whether rewards say which prompts a partition holds
    measured   whether "fast" alone lets numbers differ: they may as far as the control pair's do
    notes      why something else than equal bits is required, where it is not the topology
    """

    updates: int
    trained: float = 0.0
    reused: bool = False
    undeclared: str = ""
    rollouts: bool = True
    judged: bool = True
    apart: int
    recorded: bool = False
    refilled: bool = False
    measured: bool = False
    notes: tuple[str, ...] = ()

    def tolerance(self, origin: Origin, update: int, version: int) -> float:
        """How far a quantity may differ at an update: 0.0 not by a bit, infinite: as it likes.

        ``version``: the newest policy version that made a sample of the update.
        """
        if self.trained == 0.0 and self.rollouts:
            return 0.0
        same_rollouts = self.recorded or (self.rollouts and (self.trained == 0.0 or version <= self.apart))
        if origin == "data" and not self.refilled:
            return 0.0
        if origin in ("data", "rollout"):
            return 0.0 if same_rollouts else math.inf
        if not same_rollouts:
            return math.inf
        if origin == "judged" and self.judged:
            return 0.0
        if origin == "schedule":
            return math.inf if self.trained == math.inf else 0.0
        if update <= self.apart and origin in ("log-probs", "training"):
            return 0.0 if origin == "training" and self.reused else self.trained
        if update <= self.apart and origin == "norm" and 0.0 < self.trained < math.inf:
            return GRADIENT_NORM
        return math.inf if self.trained > 0.0 else 0.0


def terms(a: RunFolder, b: RunFolder, updates: int) -> Terms:
    notes = []
    trained, rollouts = 0.0, True
    if topology(a, b):
        trained = math.inf
    if live := rollout_topology(a, b):
        rollouts = False
        notes.append("rollouts of another shape: " + _told(live))
    if not (a.replay or b.replay) and "bounded" in (a.config.staleness.mode, b.config.staleness.mode):
        rollouts = False
        notes.append('staleness.mode = "bounded": which version generates what is a matter of timing')
    fast = [run for run in (a, b) if run.config.run.determinism == "fast"]
    if fast:
        trained, rollouts = math.inf, False
        notes.append(
            f'run.determinism = "fast" in {" and ".join(str(run.path) for run in fast)}: nothing is promised of what '
            "is computed, and no row passes that is farther apart than the control pair"
        )
    loose = list(bounded(a, b))
    reused = trained == 0.0 and {name for name, _, _ in loose} == {REUSE}
    undeclared = ", ".join(name for name, tolerance, _ in loose if tolerance is None)
    for name, tolerance, why in loose:
        trained += tolerance or 0.0
        told = "of no declared tolerance" if tolerance is None else f"by {tolerance:g}"
        notes.append(f"{name} is bounded: log-probs {told} ({why})")
    kl = a.config.algorithm.kl_reward_coef > 0
    return Terms(
        updates=updates,
        trained=trained,
        reused=reused,
        undeclared=f"the manifest says that {undeclared} is bounded, and not by how much" if undeclared else "",
        rollouts=rollouts,
        judged=not (kl and trained > 0) and not {"device", "hardware", "torch"} & topology(a, b).keys(),
        apart=next(
            (k for k in range(updates) if a.prints(k).get("parameters") != b.prints(k).get("parameters")), updates
        ),
        recorded=a.replay or b.replay,
        refilled=a.config.rollout.refill_rounds > 0 and not (a.replay or b.replay),
        measured=bool(fast) and not topology(a, b) and not live,
        notes=tuple(notes),
    )


def _told(apart: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {x} against {y}" for name, (x, y) in apart.items())


REUSE = "logprob_reuse"
"""Changes where old-policy log-probs come from alone; the training forward is the same with it and without."""


def bounded(a: RunFolder, b: RunFolder) -> Iterator[tuple[str, float | None, str]]:
    """Switches that are on in one run alone and not exact there: name, tolerance of log-probs (None: the manifest has
    no number), reason.
    """
    x, y = _switches(a), _switches(b)
    for name in sorted(x.keys() ^ y.keys()):
        numerics = (x | y)[name]
        if numerics.get("numerics") == "bounded":
            tolerance = numerics.get("tolerance")
            if not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
                tolerance = None
            yield name, tolerance, str(numerics.get("why", "see the manifest"))


def _switches(run: RunFolder) -> dict[str, Mapping[str, Any]]:
    """What the manifest says of the switches that are on."""
    found = run.session.get("switches", {})
    return {
        name: value if isinstance(value, dict) else {"numerics": value}
        for name, value in found.items()
        if name != "condition"
    }
