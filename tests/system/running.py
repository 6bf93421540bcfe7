"""Runs of the real command on a tiny random model, for the system tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import tiny

HERE = Path(__file__).parent
TIMES = ("_s", "_mib", "_per_s", "bytes", "overlap_fraction")


def recipe(folder: Path, **tables: dict[str, Any]) -> Path:
    """A recipe of 5 updates of 8 prompts x 4 samples on the tiny model; ``tables`` change or add options."""
    settings: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "updates": 5},
        "model": {"config": tiny.BLOCK},
        "rollout": {
            "prompts_per_partition": 8,
            "n_samples_per_prompt": 4,
            "groups_per_decode_batch": 3,
            "max_response_tokens": 8,
        },
        "reward": {"function": "rewards:variety"},
        "actor": {"lr": 1e-2, "warmup_updates": 1, "max_tokens_per_microbatch": 160},
        "checkpoint": {"every": 1, "keep": 3},
        "eval": {"every": 2, "prompts": 12},
    }
    for name, table in tables.items():
        settings[name] = settings.get(name, {}) | table
    if "path" in settings["model"]:
        settings["model"].pop("config")
    path = folder / "recipe.toml"
    path.write_text("\n".join(f"[{name}]\n" + "\n".join(_lines(table)) for name, table in settings.items()))
    return path


def _lines(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in table.items()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value)


def start(
    recipe: Path, *arguments: str, command: str = "train", output: IO[str] | int = subprocess.PIPE
) -> subprocess.Popen[str]:
    return stretto(command, str(recipe), *arguments, output=output)


def stretto(*words: str, output: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    """The command itself, as ``start`` begins it."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "stretto.cli", *words],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit_s: float = 200) -> str:
    output, _ = process.communicate(timeout=limit_s)
    return output


def train(recipe: Path, *arguments: str, code: int = 0, limit_s: float = 200) -> str:
    """Run to the end; the output. Fails unless it ends with ``code``."""
    process = start(recipe, *arguments)
    output = finish(process, limit_s)
    assert process.returncode == code, output
    return output


def wait_for(process: subprocess.Popen[str], text: str, limit_s: float = 200) -> str:
    """Read output until a line holds ``text``; what was read."""
    seen = ""
    deadline = time.monotonic() + limit_s
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"{text!r} did not appear:\n{seen}")


def jsonl(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def numbers(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what is measured by a clock or a memory counter."""
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in jsonl(run, "metrics.jsonl")]
