"""``stretto parity replay``: a run on what a recording holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from stretto import switches
from stretto.config import Config, Seams
from stretto.preflight import checked
from stretto.recording import Recording
from stretto.settings import OPTIONS, resolve
from stretto.training import interruptible, train
from stretto.types import ConfigError, StrettoError
from stretto.wording import Given, shown

FIXED: dict[str, str] = {
    "model.": "it processes prompts and measures log-probs",
    "data.": "prompts are those of the recording",
    "reward.": "rewards are those of the recording",
    "eval.": "nothing is generated, so that nothing can be evaluated",
    "rollout.prompts_per_partition": "partitions are those of the recording",
    "rollout.n_samples_per_prompt": "prompt groups are those of the recording",
    "rollout.max_response_tokens": "responses are those of the recording",
    "rollout.temperature": "log-probs are those of responses drawn at this temperature",
    "rollout.top_p": "responses are those of the recording",
    "rollout.top_k": "responses are those of the recording",
    "rollout.stop": "responses are those of the recording",
    "rollout.refill_rounds": "what was dropped is not recorded",
}
"""Options, by the beginnings of their names, that a replay takes from its recording as they are, and why."""
MOVABLE = "model.path"
"""May name another folder: the model in it must be the same, which a run looks at when it starts."""


def replay(
    path: Path,
    run_dir: Path,
    sets: Sequence[str] = (),
    *,
    timing: Literal["instant", "recorded"] = "instant",
    partitions: int | None = None,
    dump: int = -1,
) -> None:
    """Train in ``run_dir`` on the first ``partitions`` partitions of the recording ``path``; with ``dump``, gradients
    and parameters are written down after that partition.

    Raises:
        ConfigError: options that do not fit one another, this machine or the recording.
        StrettoError: there is no such recording, ``run_dir`` holds a run, or the run fails.
        Interrupted: it was asked to end.
    """
    with interruptible():
        recording = Recording(path)
        if (run_dir / "metrics.jsonl").exists():
            raise StrettoError(f"{run_dir} already holds a run; replay into a new folder, or remove it")
        wanted = recording.partitions if partitions is None else partitions
        seams = Seams(
            replay=str(path.absolute()), replay_timing=timing, partitions=min(wanted, recording.partitions),
            dump_partition=dump,
            checkpoints=False,
        )  # fmt: skip
        base = replayed_options(recording)
        if problems := list(_problems(recording, base, seams, run_dir, sets, wanted)):
            raise ConfigError(problems)
        config, sources = checked(None, [*sets, f"run.dir={run_dir}"], base=base, seams=seams)
        config = switches.applied(config)

        def left(done: int, _saved: int) -> str:
            return (
                f"stopped after {done} of {config.updates_to_train} updates; a replay writes no checkpoints: remove "
                f"{run_dir}, and replay again"
            )

        train(config, sources, resume=False, left=left)


def replayed_options(recording: Recording) -> dict[str, Given]:
    """The options of the recorded run, and what a replay must change in them."""
    options = recording.config.model_dump()
    values = {name: options[name.split(".")[0]][name.split(".")[1]] for name in OPTIONS}
    base = {name: Given(value, f"recording {recording.path}") for name, value in values.items()}
    changes = {
        "data.shuffle": False,  # prompts come in the order in which they were recorded
        "eval.every": 0,
        "rollout.refill_rounds": 0,  # what was kept is recorded
        "algorithm.importance_correction": recording.config.importance_correction,  # auto depends on the staleness
    }
    return base | {name: Given(value, "replay") for name, value in changes.items() if values[name] != value}


def _problems(
    recording: Recording,
    base: Mapping[str, Given],
    seams: Seams,
    run_dir: Path,
    sets: Sequence[str],
    wanted: int,
) -> Iterator[str]:
    """What a replay cannot do, all at once. Options that are wrong in themselves are told alone."""
    if wanted > recording.partitions:
        yield f"--partitions {wanted}: {recording.path} holds {recording.partitions}; ask for at most that many"
    if named := [text for text in sets if text.partition("=")[0].strip() == "run.dir"]:
        yield f"--set {named[-1]}: the run folder of a replay is its second argument, here {str(run_dir)!r}"
    resolved = resolve(None, sets, os.environ, base=base, seams=seams)
    if resolved.problems:
        yield from resolved.problems
        return
    config = resolved.config
    yield from unmet(config, resolved.sources, {name: given.value for name, given in base.items()})
    if config.partitions < seams.partitions:
        enough = seams.partitions * config.updates_per_partition
        yield (
            f"run.updates = {config.run.updates}: {seams.partitions} partitions of {config.updates_per_partition} "
            f"updates take {enough}; set run.updates to at least that, or ask for --partitions {config.partitions}"
        )


def unmet(config: Config, sources: Mapping[str, str], recorded: Mapping[str, Any]) -> Iterator[str]:
    """Every option with another value than the recording's that it cannot have, with the reason."""
    for name, value in recorded.items():
        why = next((why for start, why in FIXED.items() if name.startswith(start)), None)
        block, key = name.split(".")
        now = getattr(getattr(config, block), key)
        if why is None or now == value or (name == MOVABLE and value and now):
            continue
        yield (
            f"{name} = {shown(now)} ({sources.get(name, 'default')}): a replay takes it from the recording, where it "
            f"is {shown(value)}: {why}; leave it out, or record again"
        )
