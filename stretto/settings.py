"""Where the options of a run come from: defaults, a TOML recipe, the environment and ``--set``.

Every option has one dotted name (``actor.lr``). A stronger source replaces the value of a weaker one, each value
keeps the name of its source, and everything that is wrong is reported at once. Importing this module loads no
torch, ray or transformers.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_origin

from pydantic import ValidationError

from stretto.checks import cross_field_problems
from stretto.config import Block, Config, Seams
from stretto.controls import accepted, read_controls
from stretto.problems import Problem
from stretto.types import ConfigError
from stretto.wording import Given, form, nearest, shown

ENV_PREFIX = "STRETTO_"
NOTHING: Mapping[str, Given] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: its dotted name, what it accepts in words, its default and what it means."""

    name: str
    form: str
    default: Any
    description: str
    annotation: Any

    @property
    def env(self) -> str:
        """The environment variable that sets it, ``STRETTO_BLOCK__KEY``."""
        return ENV_PREFIX + self.name.replace(".", "__").upper()

    @property
    def is_table(self) -> bool:
        return self.form == "a table"


def _blocks() -> dict[str, type[Block]]:
    annotations = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: block for name, block in annotations.items() if isinstance(block, type) and issubclass(block, Block)}


def options() -> dict[str, Option]:
    """Every option of a run by its dotted name, in the order of ``stretto/config.py``."""
    return {
        f"{block}.{key}": Option(
            name=f"{block}.{key}",
            form=form(field.annotation, field.metadata),
            default=field.default,
            description=field.description or "",
            annotation=field.annotation,
        )
        for block, model in _blocks().items()
        for key, field in model.model_fields.items()
    }


OPTIONS = options()
BLOCKS = tuple(_blocks())


FIELD_NAMES = {
    "learning_rate": "actor.lr",
    "batch_size": "rollout.prompts_per_partition",
    "train_batch_size": "rollout.prompts_per_partition",
    "rollout_batch_size": "rollout.prompts_per_partition",
    "num_generations": "rollout.n_samples_per_prompt",
    "group_size": "rollout.n_samples_per_prompt",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "max_steps": "run.updates",
    "steps": "run.updates",
    "total_steps": "run.updates",
    "output_dir": "run.dir",
    "clip_range": "algorithm.clip_low",
    "clip_eps": "algorithm.clip_low",
    "max_grad_norm": "actor.grad_clip",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "model_name_or_path": "model.path",
}
"""What other trainers call an option, by key alone."""


def suggest(name: str) -> list[str]:
    """The options that a misspelled dotted name may mean, at least one: a key of that very name in other blocks,
    else the nearest key of the named block, else the nearest of all options. Where the block is misspelled, only what
    that block has.
    """
    block, dot, key = name.lower().partition(".")
    misspelled = dot and block not in BLOCKS
    block = (near_block(block) or block) if misspelled else block
    if f"{block}.{key}" in OPTIONS:
        return [f"{block}.{key}"]
    if misspelled and block in BLOCKS and not FIELD_NAMES.get(key, "").startswith(f"{block}."):
        return [_nearest_key(block, key)]
    if known := FIELD_NAMES.get(key if dot else block):
        return [known]
    same_key = [option for option in OPTIONS if option.split(".")[1] == (key if dot else block)]
    if same_key:
        return same_key
    if block in BLOCKS and dot:
        return [_nearest_key(block, key)]
    return [nearest(name, OPTIONS)]


def near_block(name: str) -> str:
    """The block that a misspelled name is like; empty where it is like none."""
    return next(iter(difflib.get_close_matches(name.lower(), BLOCKS, n=1)), "")


def _nearest_key(block: str, key: str) -> str:
    keys = (option.split(".")[1] for option in OPTIONS if option.startswith(f"{block}."))
    return f"{block}.{nearest(key, keys)}"


def parse_text(text: str, option: Option | None = None) -> Any:
    """The value of an environment variable or of ``--set``: TOML where it is TOML, else the bare string.

    A string option takes any text that is not a quoted TOML string as it stands, so ``run.dir=2026`` needs no quotes.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(parsed) != {"value"}:  # a line break in the text started a second TOML key
        return text
    value = parsed["value"]
    wants_text = option is not None and (option.annotation is str or get_origin(option.annotation) is Literal)
    return text if wants_text and not isinstance(value, str) else value


class _Draft:
    """Values gathered so far, weakest source first, with everything that is wrong about their names."""

    def __init__(self) -> None:
        self.given: dict[str, Given] = {}
        self.inner_origins: dict[str, str] = {}
        self.problems: list[str] = []
        self.suspects: set[str] = set()
        self.unread = False

    def unknown(self, name: str, origin: str) -> None:
        """Report a name that is no option; a check of the option that it seems to mean would only repeat that."""
        block, dot, _ = name.partition(".")
        if dot and block and block.lower() not in BLOCKS and not near_block(block):
            self.no_block(name, block, origin)
            return
        near = suggest(name)
        self.suspects.update(near)
        self.problems.append(f"{_key(name)} ({origin}): no such option; did you mean {' or '.join(near)}?")

    def no_block(self, name: str, block: str, origin: str) -> None:
        near = near_block(block)
        self.suspects.update(option for option in OPTIONS if near and option.startswith(f"{near}."))
        remedy = f"did you mean [{near}]?" if near else f"the blocks are {', '.join(BLOCKS)}"
        self.problems.append(f"{_key(name)} ({origin}): no such block; {remedy}")

    def assign(self, name: str, value: Any, origin: str) -> None:
        """Set an option, or one entry inside a table option (``model.config.text.hidden_size``)."""
        block, key, *inner = [*name.split("."), ""][:2] + name.split(".")[2:]
        option = OPTIONS.get(f"{block}.{key}")
        if option is None or (inner and not (option.is_table and all(inner))):
            self.unknown(name, origin)
            return
        if not inner:
            self.given[option.name] = Given(_as_declared(option, value), origin)
            for stale in [n for n in self.inner_origins if n.startswith(f"{option.name}.")]:
                del self.inner_origins[stale]
            return
        before = self.given.get(option.name, Given({}, origin))
        table: Any = copy.deepcopy(before.value) if isinstance(before.value, dict) else {}
        self.given[option.name] = Given(table, before.origin)
        for part in inner[:-1]:
            if not isinstance(table.setdefault(part, {}), dict):
                table[part] = {}
            table = table[part]
        table[inner[-1]] = value
        self.inner_origins[name] = origin

    def read_file(self, path: Path) -> None:
        origin = f"file {path}"
        try:
            data = _read_toml(path)
        except ConfigError as error:
            self.problems += error.problems
            self.unread = True
            return
        for block, table in data.items():
            if block not in BLOCKS:
                if isinstance(table, dict):
                    self.no_block(block, block, origin)
                else:  # a key above every block
                    self.unknown(block, origin)
            elif not isinstance(table, dict):
                self.problems.append(f"{block} = {shown(table)} ({origin}): expected a table, headed [{block}]")
            else:
                for key, value in table.items():
                    if "." in key:  # a quoted key: never an option, nor a path into a table
                        self.unknown(f"{block}.{key}", origin)
                    else:
                        self.assign(f"{block}.{key}", value, origin)

    def read_environment(self, environ: Mapping[str, str]) -> None:
        for variable in sorted(v for v in environ if v.startswith(ENV_PREFIX)):
            name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            option = OPTIONS.get(".".join(name.split(".")[:2]))
            if option is None or (name != option.name and not option.is_table):
                near = suggest(name)
                self.suspects.update(near)
                meant = " or ".join(OPTIONS[n].env for n in near)
                self.problems.append(
                    f"{variable} (environment): no such option; did you mean {meant}? "
                    f"The prefix {ENV_PREFIX} is kept for options: unset the variable or correct its name"
                )
                continue
            exact = option if name == option.name else None
            self.assign(name, parse_text(environ[variable], exact), f"environment {variable}")
        for control, name, switched in read_controls(environ):
            before = self.given.get(name)
            if switched is None:
                self.suspects.add(name)
                self.problems.append(
                    f"{control} = {shown(environ[control])} (environment): expected {accepted(control)}; or unset it"
                )
            elif before and before.origin == f"environment {OPTIONS[name].env}" and before.value != switched:
                self.suspects.add(name)
                self.problems.append(
                    f"{control} = {shown(environ[control])} and {OPTIONS[name].env} = {shown(before.value)} "
                    f"(environment) both set {name}, to different values; unset one of them"
                )
            else:
                self.assign(name, switched, f"environment {control}")

    def read_sets(self, sets: Sequence[str]) -> None:
        for text in sets:
            name, equals, value = text.partition("=")
            name = name.strip()
            if not equals:
                self.problems.append(f"--set {shown(text)}: expected block.key=value, such as --set actor.lr=0.001")
                continue
            self.assign(name, parse_text(value.strip(), OPTIONS.get(name)), "--set")

    def bad_values(self) -> dict[str, str]:
        """One problem for every option whose value has the wrong type or lies outside its range."""
        try:
            _build(self.given)
        except ValidationError as error:
            names = dict.fromkeys(".".join(str(part) for part in e["loc"][:2]) for e in error.errors())
            return {
                name: f"{name} = {self.given[name]}: expected {OPTIONS[name].form}; "
                f"the default is {shown(OPTIONS[name].default)}"
                for name in names
            }
        return {}


def _key(name: str) -> str:
    """A key as it is written, quoted where it holds anything but bare TOML characters."""
    return name if name and all(c.isalnum() or c in "_-." for c in name) else json.dumps(name)


def _as_declared(option: Option, value: Any) -> Any:
    """TOML has lists only: a tuple option takes one. Nothing else is converted."""
    return tuple(value) if get_origin(option.annotation) is tuple and isinstance(value, list) else value


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        folder = path.parent
        if path.is_dir():
            raise ConfigError([f"recipe {path} is a folder: name one of its files ({_recipes_in(path)})"])
        where = f"in {folder}: {_recipes_in(folder)}" if folder.is_dir() else f"there is no folder {folder} either"
        raise ConfigError([f"recipe {path} does not exist; {where}"])
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a byte order mark first
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"recipe {path} is not valid TOML: {error}"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"recipe {path} can not be read: {error}"]) from error


def _recipes_in(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.glob("*.toml"))) or "no recipe (*.toml)"


@dataclass
class Resolved:
    """The options of a run and everything that is known to be wrong with them.

    Attributes:
        config: the options; those that are wrong have their defaults.
        sources: by dotted name, where each value came from; see ``load``.
        problems: one message for each mistake.
        doubtful: names of the options that problems are about. What else is said of them would only repeat it.
        unknown: those of them whose value is not the one meant: it is malformed, or the name is no option's.
        unread: the recipe could not be read, so that the options are not those meant.
    """

    config: Config
    sources: dict[str, str]
    problems: list[str]
    doubtful: set[str]
    unknown: frozenset[str]
    unread: bool

    def add(self, found: Iterable[Problem]) -> None:
        """Take up further problems, but for those of options that are doubtful already."""
        new = [p for p in found if not self.doubtful & set(p.names)]
        self.problems += [p.text for p in new]
        self.doubtful.update(name for p in new for name in p.names)


def load(
    recipe: Path | None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    training: bool = True,
) -> tuple[Config, dict[str, str]]:
    """Resolve the options of a run: defaults < ``recipe`` < ``environ`` < ``sets``.

    ``sets`` are ``block.key=value`` texts. ``training = False`` (evaluation, export) leaves out the checks that only
    concern training rollouts. Returns the config and, by dotted name, where each value came from: ``default``,
    ``file recipes/x.toml``, ``environment STRETTO_ACTOR__LR`` or ``--set``.

    Raises ConfigError with every problem at once: names, types, ranges and options that do not fit together.
    Nothing is asked of the machine here; that is ``stretto.machine_checks.check_machine``.
    """
    resolved = resolve(recipe, sets, environ, training=training)
    if resolved.problems:
        raise ConfigError(resolved.problems)
    return resolved.config, resolved.sources


def resolve(
    recipe: Path | None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    training: bool = True,
    base: Mapping[str, Given] = NOTHING,
    seams: Seams | None = None,
) -> Resolved:
    """As ``load``, but problems are returned, for more to be added to them.

    ``base`` are values weaker than a recipe's, by dotted name; ``seams`` those of a run that the parity tool starts.
    """
    draft = _Draft()
    draft.given.update({name: Given(_as_declared(OPTIONS[name], g.value), g.origin) for name, g in base.items()})
    if recipe is not None:
        draft.read_file(recipe)
    draft.read_environment(environ)
    draft.read_sets(sets)
    bad = draft.bad_values()
    good = {name: given for name, given in draft.given.items() if name not in bad}
    config = _build(good).model_copy(update={} if seams is None else {"seams": seams})
    sources = {name: good[name].origin if name in good else "default" for name in OPTIONS} | draft.inner_origins
    unknown = frozenset(draft.suspects | bad.keys())
    resolved = Resolved(config, sources, [*draft.problems, *bad.values()], set(unknown), unknown, draft.unread)
    if not draft.unread:
        crossed = cross_field_problems(config, sources, training=training)
        doubtful = set(resolved.doubtful)  # of one option, all that does not fit is said
        for problem in crossed:
            if not doubtful & set(problem.names):
                resolved.problems.append(problem.text)
                resolved.doubtful.update(problem.names)
    return resolved


def _build(given: Mapping[str, Given]) -> Config:
    nested: dict[str, dict[str, Any]] = {}
    for name, item in given.items():
        block, key = name.split(".")
        nested.setdefault(block, {})[key] = item.value
    return Config.model_validate(nested)
