"""Reads plans from short TOML files and keeps them with their campaign.

A plan is written before any run, and a changed one is refused: nobody moves a window after seeing a curve.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stretto import switches
from stretto.bench.plan import BASE, LETTERS, Plan
from stretto.bench.plan_checks import bad_values, problems_of, unknown_keys
from stretto.observe.lineage import write_atomically
from stretto.types import ConfigError
from stretto.wording import shown

PLAN_KEYS = frozenset(Plan.model_fields)


def parse_plan(data: Mapping[str, Any]) -> Plan:
    """A plan from the tables of its file, short or canonical.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    given: dict[str, Any] = {key: _tuples(value) for key, value in data.items()}
    factorial = given.pop("factorial", ())
    problems = unknown_keys(given)
    given = {key: _dotted(value) if key == "settings" else value for key, value in given.items() if key in PLAN_KEYS}
    if isinstance(given.get("variants"), dict):
        given["variants"] = {name: _dotted(table) for name, table in given["variants"].items()}
    if not _is_factorial(factorial):
        letters = ", ".join(LETTERS)
        problems.append(f'factorial = {shown(factorial)}: expected lists of {letters}, such as [["P"], ["R", "S"]]')
        factorial = ()
    listed = given.get("conditions", ())
    if isinstance(listed, tuple) and all(isinstance(name, str) for name in listed):
        given["conditions"] = tuple(dict.fromkeys([BASE, *_expanded(factorial), *map(_ordered, listed)]))
    try:
        plan = Plan.model_validate(given)
    except ValidationError as error:
        raise ConfigError([*problems, *bad_values(error, given)]) from None
    if problems := [*problems, *problems_of(plan)]:
        raise ConfigError(problems)
    return plan


def load_plan(path: Path, root: Path = Path()) -> Plan:
    """The plan of a TOML file, with the SHA-256 of its recipe, whose path is relative to ``root``.

    Raises:
        ConfigError: everything that is wrong with it; a recipe that is not there, or not the one that was planned with.
    """
    plan = parse_plan(_read(path))
    try:
        found = hashlib.sha256((root / plan.recipe).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError([f"recipe = {shown(plan.recipe)} cannot be read: {error.strerror}"]) from None
    if plan.recipe_sha256 not in ("", found):
        raise ConfigError(
            [f"recipe {plan.recipe} has SHA-256 {found}, planned with {plan.recipe_sha256}: restore it, or plan anew"]
        )
    return plan.model_copy(update={"recipe_sha256": found})


def keep_plan(plan: Plan, folder: Path) -> Path:
    """Writes ``<sha256>.plan.toml`` into the folder of a campaign, which is made, unless it is there already.

    Raises:
        ConfigError: the folder belongs to another plan; says which fields differ, with both values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plan.sha256}.plan.toml"
    if any(folder.glob("*.plan.toml")):
        kept = read_kept_plan(folder)
        if kept.sha256 != plan.sha256:
            raise ConfigError(
                [f"{folder} has another plan, which does not change any more: name a new folder", *changes(kept, plan)]
            )
        return path
    write_atomically(path, plan.text.encode())
    return path


def read_kept_plan(folder: Path) -> Plan:
    """The plan of a campaign's folder.

    Raises:
        ConfigError: there is none, or several; its file is not the one that its name promises; it is of a version of
            the package that reads plans otherwise.
    """
    paths = sorted(folder.glob("*.plan.toml"))
    if len(paths) != 1:
        found = ", ".join(path.name for path in paths) or "none"
        raise ConfigError([f"{folder} must hold exactly one plan (<sha256>.plan.toml); found {found}"])
    name, data = paths[0].name.partition(".")[0], paths[0].read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != name:
        raise ConfigError([f"{paths[0]} was changed after it was written: its SHA-256 is now {found}; restore it"])
    plan = parse_plan(_read(paths[0]))
    if plan.sha256 != name:
        raise ConfigError(
            [
                f"{paths[0]} was written by another version of the package, and to this one it is plan {plan.sha256}: "
                "use the version that ran it, whose commit is in the manifests of its cells"
            ]
        )
    return plan


def changes(old: Plan, new: Plan) -> list[str]:
    """One line for each field that differs: ``windows: ["10-59"], now ["20-59"]``."""
    before, after = old.model_dump(), new.model_dump()
    return [f"{key}: {shown(before[key])}, now {shown(after[key])}" for key in before if before[key] != after[key]]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"plan {path} is not valid TOML: {error}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"plan {path} cannot be read: {error}"]) from None


def _tuples(value: Any) -> Any:
    """TOML has lists only, and a plan tuples only."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _dotted(table: Any) -> Any:
    """Options by dotted name, written ``"actor.lr" = 1`` or ``actor.lr = 1``; what is no table stays."""
    if not isinstance(table, dict):
        return table
    found: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, dict) and "." not in key
        found |= {f"{key}.{inner}": item for inner, item in value.items()} if nested else {key: value}
    return found


def _ordered(condition: str) -> str:
    """``S+P`` as ``P+S``; what is no condition is left for the checks."""
    named, bracket, label = condition.partition("(")
    letters = switches.letters(named)
    return condition if letters is None else f"{'+'.join(letters) or BASE}{bracket}{label}"


def _is_factorial(value: Any) -> bool:
    entries = value if isinstance(value, tuple) else (value,)
    return all(isinstance(entry, tuple) and entry and all(one in LETTERS for one in entry) for entry in entries)


def _expanded(factorial: Sequence[Sequence[str]]) -> Iterator[str]:
    for chosen in product(*(["", *entry] for entry in factorial)):
        yield "+".join(letter for letter in LETTERS if letter in chosen) or BASE
