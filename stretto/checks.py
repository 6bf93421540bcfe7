"""What options must satisfy together. Importing this module loads no torch, ray or
transformers.

Every check names the options it reads with their values and where those came from, and ends with the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from stretto import model_table
from stretto.algorithm_checks import algorithm_problems
from stretto.config import Config
from stretto.engine_checks import engine_problems
from stretto.problems import Problem, Reader
from stretto.types import ConfigError
from stretto.wording import shown

LOWEST_TEMPERATURE = 0.01


def cross_field_problems(config: Config, origins: Mapping[str, str], *, training: bool = True) -> list[Problem]:
    """Every way in which options that are fine one by one do not fit together.

    ``origins`` says where each given value came from, by dotted name; a missing one is a default. ``training = False``
    leaves out what only matters where responses are sampled to train on them.
    """
    reader = Reader(config, origins)
    found = [*_paths(config, reader), *_model(config, reader), *_cores(config, reader), *_stop(config, reader)]
    found += _data(config, reader, training)
    if training:
        found += [*_sampling(config, reader), *_batches(config, reader), *_timeouts(config, reader)]
        found += [*engine_problems(config, reader)]
        found += [*algorithm_problems(config, reader), *_switches(config, reader)]
    return found


def check(config: Config, *, training: bool = True) -> None:
    """Raise ConfigError with every cross-field problem of a config that was made in code, by a switch for example."""
    problems = cross_field_problems(config, {}, training=training)
    if problems:
        raise ConfigError([p.text for p in problems])


def _model(config: Config, reader: Reader) -> Iterator[Problem]:
    model = config.model
    if model.path and model.config is not None:
        yield reader.problem("model.path", "model.config", why="they exclude one another; keep one of the two")
    if not model.path and model.config is None:
        yield reader.problem(
            "model.path",
            "model.config",
            why="there is no model; set model.path to a local folder or a hub id, "
            "or write a [model.config] table for random weights",
        )
    # Any key of the table in doubt makes the whole table so.
    table = None if model.path else model.config
    for name, text in model_table.problems(table, reader.origins):
        yield Problem(("model.config", name), text)
    if model.max_pixels < model.min_pixels:
        yield reader.problem("model.min_pixels", "model.max_pixels", why="set max_pixels to at least min_pixels")


def _paths(config: Config, reader: Reader) -> Iterator[Problem]:
    if not config.run.dir.strip():
        yield reader.problem("run.dir", why="a run needs a folder; name one, such as runs/first")
    for name, path in (("run.dir", config.run.dir), ("model.path", config.model.path)):
        if path.startswith("~"):  # what is left once home folders are filled in
            yield reader.problem(name, why=f"there is no home folder {Path(path).parts[0]}; write the path out")


def _stop(config: Config, reader: Reader) -> Iterator[Problem]:
    if "" in config.rollout.stop:
        yield reader.problem("rollout.stop", why='every response holds "", so that none would begin; leave it out')


def _switches(config: Config, reader: Reader) -> Iterator[Problem]:
    if config.switches.logprob_reuse and config.switches.chunk_overlap:
        yield reader.problem(
            "switches.logprob_reuse",
            "switches.chunk_overlap",
            why="R leaves no old-policy forward for S to overlap, and their effects must not be conflated; switch one "
            "of them off",
        )


_DIGITS = ("digits", "worked", "layout", "labelled_images")
SPLITS = ("train_files", "validation_files", "test_files")
_FILES = (
    *SPLITS, "image_folder", "prompt_column", "images_column", "answer_column", "source_column", "id_column",
    "bad_rows", "overlong_prompts", "max_prompt_tokens",
)  # fmt: skip
DATA_EXTENSIONS = (".jsonl", ".parquet")


def _data(config: Config, reader: Reader, training: bool) -> Iterator[Problem]:
    data = config.data
    other = _DIGITS if data.source == "files" else _FILES
    for key in other:
        if getattr(data, key) != type(data).model_fields[key].default:
            meant = 'leave it out, or set data.source to "digits"' if other is _DIGITS else 'set data.source to "files"'
            yield reader.problem(f"data.{key}", "data.source", why=f"that source does not read it; {meant}")
    if data.source != "files":
        return
    if not data.train_files:
        yield reader.problem("data.train_files", why="name at least one .jsonl or .parquet file")
    if training and config.eval.every > 0 and not data.validation_files:
        yield reader.problem(
            "eval.every",
            "data.validation_files",
            why="there is nothing to evaluate on; name files, or set eval.every to 0",
        )
    for key in SPLITS:
        names = getattr(data, key)
        if wrong := [name for name in names if Path(name).suffix.lower() not in DATA_EXTENSIONS]:
            yield reader.problem(
                f"data.{key}",
                why=f"{shown(wrong[0])} is neither .jsonl (one JSON object a line) nor .parquet; convert it, or rename "
                "it where it is one of the two",
            )
        if double := [name for name in names if names.count(name) > 1]:
            yield reader.problem(f"data.{key}", why=f"{shown(double[0])} is named twice; name it once")
    if not data.prompt_column:
        yield reader.problem("data.prompt_column", why="every row needs a prompt; name its column")


def _cores(config: Config, reader: Reader) -> Iterator[Problem]:
    cluster = config.cluster
    for name, cores in (("actor_cores", cluster.actor_cores), ("rollout_cores", cluster.rollout_cores)):
        if len(set(cores)) < len(cores) or any(core < 0 for core in cores):
            yield reader.problem(f"cluster.{name}", why="expected core numbers from 0 on, each once")
    shared = sorted(set(cluster.actor_cores) & set(cluster.rollout_cores))
    if shared:
        yield reader.problem(
            "cluster.actor_cores",
            "cluster.rollout_cores",
            why=f"actor and rollout run concurrently on cores of their own; give {shown(shared)} to one of them",
        )


def _sampling(config: Config, reader: Reader) -> Iterator[Problem]:
    rollout, staleness = config.rollout, config.staleness
    measure = "training samples from the very distribution whose log-probs it compares"
    if rollout.temperature == 0:
        yield reader.problem("rollout.temperature", why=f"{measure}; set a temperature above 0, such as 1.0")
    elif rollout.temperature < LOWEST_TEMPERATURE:
        yield reader.problem(
            "rollout.temperature",
            why=f"below {LOWEST_TEMPERATURE} all samples of a group come out the same, so that nothing is learned, and "
            "log-probs magnify rounding by 1 / temperature; set one well above it, such as 1.0",
        )
    if rollout.top_p < 1:
        yield reader.problem("rollout.top_p", why=f"{measure}; set top_p to 1.0")
    if rollout.top_k > 0:
        yield reader.problem("rollout.top_k", why=f"{measure}; set top_k to 0")
    if config.seams.replay:
        return  # stamps are those of the recording, and nothing is generated: staleness decides what waits for what
    if staleness.max > 0 and config.importance_correction == "none" and config.algorithm.old_policy != "rollout":
        yield reader.problem(
            "staleness.max",
            "algorithm.importance_correction",
            why='stale samples need an off-policy correction; set importance_correction to "auto", "tis" '
            'or "mis", old_policy to "rollout", or staleness.max to 0',
        )
    if staleness.mode == "bounded" and config.run.determinism == "exact":
        yield reader.problem(
            "staleness.mode",
            "run.determinism",
            why="in bounded mode timing decides which version generates what, so no two runs are alike; set "
            'staleness.mode to "lockstep", or run.determinism to "fast"',
        )


def _timeouts(config: Config, reader: Reader) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.max_engine_restarts and rollout.engine_timeout_s >= config.plane.fetch_timeout_s:
        yield reader.problem(
            "rollout.engine_timeout_s",
            "rollout.max_engine_restarts",
            "plane.fetch_timeout_s",
            why="a claim would give up before an engine that hangs is replaced; set engine_timeout_s well below "
            "fetch_timeout_s, or max_engine_restarts to 0",
        )


def _batches(config: Config, reader: Reader) -> Iterator[Problem]:
    if config.actor.layout == "shared" and config.actor.gradient_checkpointing:
        yield reader.problem(
            "actor.layout",
            "actor.gradient_checkpointing",
            why="what is recomputed in the backward would find no keys and values of the shared prompt; set layout to "
            '"auto" or "padded"',
        )
    actor, longest = config.actor, config.rollout.max_response_tokens
    if actor.max_tokens_per_microbatch <= longest:
        yield reader.problem(
            "actor.max_tokens_per_microbatch",
            "rollout.max_response_tokens",
            why="a microbatch holds a whole prompt and its response, so that no prompt would fit; raise "
            f"max_tokens_per_microbatch to at least {longest + 1}, better {longest} plus the longest prompt, "
            "or lower max_response_tokens",
        )
    groups, chunks, minis = config.rollout.prompts_per_partition, actor.chunks_per_mini, actor.minis_per_partition
    if groups % (minis * chunks):
        fitting = ", ".join(str(d) for d in range(1, groups + 1) if groups % d == 0)
        product = "chunks_per_mini" if minis == 1 else "minis_per_partition * chunks_per_mini"
        yield reader.problem(
            "rollout.prompts_per_partition",
            *(["actor.minis_per_partition"] if minis > 1 else []),
            "actor.chunks_per_mini",
            why="a chunk holds whole prompt groups, equally many each; "
            f"with {groups} prompts {product} can be {fitting}",
        )
    samples = groups // (minis * chunks) * config.rollout.n_samples_per_prompt
    if config.actor.data_parallel > samples:
        yield reader.problem(
            "actor.data_parallel",
            "rollout.prompts_per_partition",
            "rollout.n_samples_per_prompt",
            *(["actor.minis_per_partition"] if minis > 1 else []),
            "actor.chunks_per_mini",
            why=f"the samples of a chunk are shared out among the ranks, and there are {max(samples, 1)} in one; set "
            f"data_parallel to at most {max(samples, 1)}, or make chunks larger",
        )
