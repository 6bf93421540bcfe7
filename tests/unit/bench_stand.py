"""A campaign whose jobs are a small script, for the tests of its runner."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny

from stretto.bench.plan import Plan
from stretto.bench.plan_file import load_plan
from stretto.bench.run import Outcome, able, run_campaign

PROGRAM = """
import json, os, sys, time
from pathlib import Path
sets = dict(word.split("=", 1) for before, word in zip(sys.argv, sys.argv[1:]) if before == "--set")
run = Path(sets["run.dir"])
with open("ran", "a") as log:
    print(run.parts[-3], file=log)
run.mkdir(parents=True)
how = json.loads(Path("behave").read_text()).get(run.parts[-3], "")
print("something was said")
if how == "hangs":
    Path("hanging").touch()
    time.sleep(60)
if how == "fails":
    raise SystemExit("this went wrong")
if how == "changes":
    Path("recipe.toml").write_text(Path("recipe.toml").read_text() + "# changed")
manifest = {"format": 1, "sessions": [{"git": {"commit": "c0ffee", "dirty": False}}]}
(run / "manifest.json").write_text(json.dumps(manifest))
(run / "metrics.jsonl").write_text("{}\\n" * int(sets["run.updates"]))
(run / "raw").mkdir()
(run / "raw" / "x").write_text("x")
"""
PLAN = {
    "name": "small",
    "recipe": "recipe.toml",
    "conditions": ["P", "P+S"],
    "seeds": [5, 6],
    "updates": 4,
    "warmup": 1,
    "windows": ["1-3"],
    "primary": ["P+S", "B"],
    "pool_size": 1,
    "settings": {"staleness.max": 0},
}
WITH_ALONE = PLAN | {"settings": {}}
ALONE = ["processor-B", "processor-P", "rollout-B", "training-B", "training-S"]
FIRST = ["00-0-B", "00-1-P", "00-2-P+S", "00-3-B"]
SECOND = ["01-0-B", "01-1-P+S", "01-2-P", "01-3-B"]


class Stand:
    """A campaign whose jobs are a small script."""

    def __init__(self, root: Path):
        self.root, self.folder = root, root / "campaign"
        model = json.dumps(tiny.BLOCK).replace(": ", " = ")
        (root / "recipe.toml").write_text(
            f"[model]\nconfig = {model}\n[rollout]\nprompts_per_partition = 8\nn_samples_per_prompt = 4\n"
        )
        (root / "program.py").write_text(PROGRAM)
        (root / "plan.toml").write_text(
            "\n".join(f"{key} = {json.dumps(value).replace(': ', ' = ')}" for key, value in PLAN.items())
        )
        self.behave()
        self.said: list[str] = []

    def behave(self) -> None:
        (self.root / "behave").write_text("{}")

    def fail(self, *names: str, way: str = "fails") -> None:
        (self.root / "behave").write_text(json.dumps(dict.fromkeys(names, way)))

    @property
    def plan(self) -> Plan:
        return load_plan(self.root / "plan.toml", self.root)

    def run(self, plan: Plan | None = None) -> Outcome:
        self.said.clear()
        (self.root / "ran").write_text("")
        return run_campaign(
            plan or self.plan,
            self.folder,
            self.said.append,
            program=(sys.executable, str(self.root / "program.py")),
            root=self.root,
        )

    @property
    def ran(self) -> list[str]:
        return (self.root / "ran").read_text().split()

    @property
    def text(self) -> str:
        return "\n".join(self.said)


def make_stand(root: Path, monkeypatch) -> Stand:
    monkeypatch.setattr("stretto.bench.attempt.LISTENS_S", 0.0001)
    monkeypatch.setattr("stretto.bench.run.able_elsewhere", able)
    monkeypatch.setattr("stretto.bench.run.git_state", lambda: {"commit": "c0ffee", "dirty": False, "changed": []})
    here(monkeypatch, "boot-1")
    return Stand(root)


def here(monkeypatch, boot: str) -> None:
    for module in ("run", "attempt"):
        monkeypatch.setattr(f"stretto.bench.{module}.boot_id", lambda: boot)
