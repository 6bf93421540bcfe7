"""The rules by which a cell is rejected, before anything is computed. Each reason names a field, with both values."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stretto.bench.campaign import Note, file_hash
from stretto.bench.design import Cell
from stretto.bench.measures import throughput
from stretto.bench.plan import Plan, condition_sets
from stretto.bench.read_cells import Read, number
from stretto.machine import ENVIRONMENT
from stretto.types import StrettoError
from stretto.wording import shown

FINITE = ("loss", "reward_mean", "ppo_kl_k1", "ppo_kl_k3", "grad_norm", "step_s")
"""Metrics that every update must have, finite."""
ANALYSED = ("run/manifest.json", "run/metrics.jsonl", "run/events.jsonl")
"""Files that a note must have the hash of."""
DIFFERING = ("run.dir", "run.seed", "run.updates", "seams.processor_workers", "seams.old_policy", "seams.phase1")
"""Options that a cell has of its own, or that its switches set."""
_SHOWN_UPDATES = 5
_GIVEN = frozenset(f"environment.{name}" for name in ENVIRONMENT)


def own_reasons(read: Read, note: Note, cell: Cell, plan: Plan) -> list[str]:
    """What is wrong with a cell whatever others are."""
    reasons = [*_note_reasons(read, note, cell, plan), *read.problems]
    if read.config is not None:
        reasons += _manifest_reasons(read, note, plan)
        reasons += _config_reasons(read, cell, plan)
    reasons += _metric_reasons(read, plan)
    for letter, evidence in read.evidence.items():
        if evidence.opportunity and not evidence.ok:
            reasons.append(f"switch {letter} is on, and did not engage: {'; '.join(evidence.facts)}")
    return reasons


def unlike_reasons(read: Read, reference: Read, plan: Plan, conditions: Iterable[str]) -> list[str]:
    """In what a cell differs from the reference cell of its campaign.

    conditions  of both: what a variant among them sets, differs by design
    """
    by_design = frozenset(name for condition in conditions for name in plan.variants.get(condition, {}))
    mine, theirs = comparable(read, by_design), comparable(reference, by_design)
    return [
        *(
            f"{kind(field)}: {_pair(field, mine.get(field), reference.name, theirs.get(field))}"
            for field in dict.fromkeys([*mine, *theirs])
            if mine.get(field) != theirs.get(field)
        ),
        *note_reasons(read, reference),
    ]


def note_reasons(read: Read, reference: Read) -> Iterator[str]:
    """In what the surroundings of two processes differ, as far as the runner wrote them down for both."""
    mine, theirs = read.attempt.note, reference.attempt.note
    if mine is None or theirs is None or not mine.environment or not theirs.environment:
        return
    for name in sorted({*mine.environment, *theirs.environment}):
        values = mine.environment.get(name), theirs.environment.get(name)
        if values[0] != values[1]:
            yield f"environment: {_pair(f'variable {name}', values[0], reference.name, values[1])}"
    if mine.niceness != theirs.niceness:
        yield f"environment: {_pair('niceness', mine.niceness, reference.name, theirs.niceness)}"


def elsewhere_reasons(read: Read, reference: Read) -> list[str]:
    """In what a process that ran beside the cells was not in the place of theirs: machine, boot, code, model, data and
    dependencies, of which not every stage alone has a manifest. Its options are others by design, and a process that
    does the work of another sets what that one is given.
    """
    mine, theirs = read.attempt.note, reference.attempt.note
    reasons = [
        f"machine: {_pair(field, getattr(mine, field), reference.name, getattr(theirs, field))}"
        for field in ("machine_id", "boot_id")
        if getattr(mine, field) != getattr(theirs, field)
    ]
    if read.session:
        if (read.session.get("git") or {}).get("dirty"):
            reasons.append("commit: git.dirty = true, expected false")
        found, expected = comparable(read), comparable(reference)
        reasons += [
            f"{kind(field)}: {_pair(field, found[field], reference.name, expected.get(field))}"
            for field in found
            if not field.startswith("config.") and field not in _GIVEN and found[field] != expected.get(field)
        ]
    return [*reasons, *note_reasons(read, reference)]


def block_reasons(read: Read, first: Read) -> Iterator[str]:
    """In what a cell differs from the first of its block: it ran elsewhere, or trained on other rows."""
    for field in ("machine_id", "boot_id"):
        mine, theirs = read.session.get(field), first.session.get(field)
        if mine != theirs:
            yield f"machine: {_pair(field, mine, first.name, theirs)}: a block is of one machine in one boot"
    for metric in ("images", "patches"):
        for update, (mine, theirs) in enumerate(zip(read.series(metric), first.series(metric), strict=False)):
            if mine != theirs:
                yield f"workload: {_pair(f'{metric} of update {update}', mine, first.name, theirs)}, with the same seed"
                break


def comparable(read: Read, by_design: Collection[str] = ()) -> dict[str, Any]:
    """Everything that must be the same in all cells, by its dotted name, without the options that differ by design:
    those of ``DIFFERING``, switches, and ``by_design``.
    """
    session = read.session
    left_out = {*DIFFERING, *by_design}
    config = {
        f"config.{name}": value
        for name, value in flat(session.get("config") or {}).items()
        if name not in left_out and not name.startswith("switches.")
    }
    machine = dict(session.get("hardware") or {})
    gpus = [(gpu.get("name"), gpu.get("memory_bytes"), gpu.get("driver")) for gpu in machine.pop("gpus", None) or []]
    memory = machine.pop("memory_bytes", None)
    git = session.get("git")
    return {
        "git.commit": None if git is None else git.get("commit"),
        "model.fingerprint": (session.get("model") or {}).get("fingerprint"),
        "data.fingerprint": (session.get("data") or {}).get("fingerprint"),
        "seeds": sorted(session.get("seeds") or {}),
        "platform": session.get("platform"),
        **_named("versions", session),
        **_named("environment", session),
        **{name: value for name, value in _named("determinism", session).items() if not name.endswith("_note")},
        **{f"hardware.{name}": value for name, value in flat(machine).items()},
        "hardware.memory_gib": None if memory is None else round(memory / 2**30),
        "hardware.gpus": gpus,
        **config,
    }


def kind(field: str) -> str:
    """Which rule a field of ``comparable`` belongs to."""
    head, _, rest = field.partition(".")
    heads = {"git": "commit", "seeds": "seed policy", "platform": "dependencies", "versions": "dependencies"}
    heads |= {"environment": "topology", "determinism": "topology", "model": "model", "data": "data"}
    if head != "config":
        return heads.get(head, head)
    block, _, key = rest.partition(".")
    if block in ("cluster",) or rest in ("actor.data_parallel", "rollout.replicas"):
        return "topology"
    if "max" in key or block == "plane":
        return "limits"
    if rest in ("run.determinism", "data.shuffle"):
        return "seed policy"
    return {"model": "model", "lora": "model", "data": "data"}.get(block, "settings")


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


# Rules that need one cell alone --------------------------------------------------------------------------------------


def _note_reasons(read: Read, note: Note, cell: Cell, plan: Plan) -> Iterator[str]:
    if note.status != "finished" or note.exit_code != 0:
        yield f"exit code: {shown(note.exit_code)}, expected 0; {note.status}: {note.reason or 'no reason is noted'}"
    if note.plan != plan.sha256:
        yield f"plan: {note.plan}, and that of the folder is {plan.sha256}"
    for field in ("condition", "seed", "block", "position"):
        if getattr(note, field) != getattr(cell, field):
            yield f"{field}: {shown(getattr(note, field))}, planned is {shown(getattr(cell, field))}"
    for name in ANALYSED:
        if name not in note.files:
            yield f"files: cell.json has no hash of {name}"
    for name, expected in note.files.items():
        try:
            found = file_hash(read.attempt.path / name)
        except OSError as error:
            found = f"not readable ({error.strerror})"
        if found != expected:
            yield f"files: {name} has SHA-256 {found}, and had {expected} when the cell ended"


def _manifest_reasons(read: Read, note: Note, plan: Plan) -> Iterator[str]:
    session = read.session
    git = session.get("git")
    if git is not None and git.get("dirty"):
        changed = ", ".join(str(line).strip() for line in (git.get("changed") or ())[:_SHOWN_UPDATES])
        yield f"commit: git.dirty = true ({changed}), expected false"
    if session.get("status") != "finished":
        cause = session.get("cause") or "no cause is noted"
        yield f"status: {shown(session.get('status'))}, expected finished; {cause}"
    if read.sessions != 1 or session.get("first_update") != 0:
        yield f"sessions: {read.sessions}, expected 1 from update 0: a cell is one fresh process"
    if session.get("updates_done") != plan.updates:
        yield f"updates: updates_done = {shown(session.get('updates_done'))}, planned are {plan.updates}"
    for field in ("machine_id", "boot_id"):
        if session.get(field) != getattr(note, field):
            yield f"machine: {_pair(field, session.get(field), 'cell.json', getattr(note, field))}"


def _config_reasons(read: Read, cell: Cell, plan: Plan) -> Iterator[str]:
    """The cell ran as the plan and its condition say."""
    found = flat(read.session["config"])
    tables = read.session["config"]
    planned = {**plan.settings, **condition_sets(plan, cell.condition)}
    planned |= {"run.seed": cell.seed, "run.updates": plan.updates}
    for name, value in planned.items():
        block, _, key = name.partition(".")
        mine = found[name] if name in found else tables.get(block, {}).get(key)
        if mine != _json(value):
            rule = "seed policy" if name == "run.seed" else "config"
            yield f"{rule}: {name} = {shown(mine)}, planned is {shown(value)}"


def _metric_reasons(read: Read, plan: Plan) -> Iterator[str]:
    rows = read.rows
    per = read.config.updates_per_partition if read.config is not None else 1
    expected = plan.updates // per
    if [row.get("update") for row in rows] != list(range(expected)):
        yield f"updates: metrics.jsonl has {len(rows)} lines, planned are updates 0 to {expected - 1}"
    for metric in FINITE:
        bad = [k for k, row in enumerate(rows) if number(row.get(metric)) is None]
        if bad:
            value = shown(rows[bad[0]].get(metric)) if metric in rows[bad[0]] else "missing"
            yield f"not finite: {metric} is {value} at update {_list(bad)}, expected a finite number"
    skipped = [k for k, row in enumerate(rows) if row.get("update_skipped")]
    if skipped:
        yield f"updates: update {_list(skipped)} was skipped, expected none"
    try:
        throughput(read, plan.measured)
    except StrettoError as error:
        yield f"throughput: {error}"
    if read.config is None:
        return
    rollout, bound = read.config.rollout, read.config.staleness.max
    samples = rollout.prompts_per_partition * rollout.n_samples_per_prompt
    for k, row in enumerate(rows):
        if row.get("samples") != samples:
            yield f"workload: samples of update {k} = {shown(row.get('samples'))}, planned are {samples}"
            break
    for k, row in enumerate(rows):
        stale = number(row.get("staleness_max"))
        if stale is None or stale > bound:
            yield f"staleness: staleness_max = {shown(row.get('staleness_max'))} at update {k}, the bound is {bound}"
            break


# Wording -------------------------------------------------------------------------------------------------------------


def _pair(field: str, mine: Any, name: str, theirs: Any) -> str:
    return f"{field} = {shown(mine)}, {name} has {shown(theirs)}"


def _list(updates: Sequence[int]) -> str:
    more = len(updates) - _SHOWN_UPDATES
    return ", ".join(map(str, updates[:_SHOWN_UPDATES])) + (f" and {more} more" if more > 0 else "")


def _named(block: str, session: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{block}.{name}": value for name, value in flat(session.get(block) or {}).items()}


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))
