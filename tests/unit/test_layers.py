"""The layers of the design, held by walking the imports of every file of the package.

types, config, compat < models, schedule, observe < data, rollout, plane, actor < switches < build, cluster, loop and
what stands beside them < cli.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "stretto"

BASE = {
    "types",
    "config",
    "settings",
    "checks",
    "compat",
    "wording",
    "machine_checks",
    "model_table",
    "problems",
    "algorithm_checks",
    "engine_checks",
    "controls",
}
SHARED = {"models", "schedule", "observe", "recording"}
STAGES = {"data", "rollout", "plane", "actor"}
SWITCHES = {"switches"}
PROOFS = {"parity", "bench"}  # read run folders, start runs through the CLI or build
TOP = {
    "actor_ranks",
    "arguments",
    "build",
    "child",
    "cluster",
    "conditions",
    "controller",
    "doctor",
    "embedded",
    "engine_process",
    "records",
    "remote",
    "resume",
    "rollout_process",
    "run_data",
    "evaluate",
    "export",
    "gap_alarm",
    "guard",
    "loop",
    "machine",
    "phase1",
    "preflight",
    "sft",
    "staleness",
    "stops",
    "training",
}
LEVEL = {unit: level for level, units in enumerate((BASE, SHARED, STAGES, SWITCHES, TOP)) for unit in units}

# What these modules may import of the package, where the level alone allows more.
WITHIN_BASE = {
    "types": set(),
    "config": {"types"},
    "compat": {"types"},
    "wording": {"types"},
    "model_table": {"config", "types", "wording"},
    "problems": {"config", "wording"},
    "algorithm_checks": {"config", "problems"},
    "engine_checks": {"config", "problems", "wording"},
    "checks": {"algorithm_checks", "engine_checks", "config", "problems", "types", "wording", "model_table"},
    "machine_checks": {"checks", "config", "problems", "settings", "wording"},
    "controls": set(),
    "settings": {"checks", "config", "controls", "problems", "types", "wording"},
}
# Modules that implement a seam which an option picks. build.py alone imports them; each exception has its reason.
IMPLEMENTATIONS = {"stretto.rollout.hf", "stretto.rollout.http", "stretto.plane.ray_plane", "stretto.data.pool"}
EXCEPTIONS = {
    ("stretto.sft", "stretto.rollout.hf"): "validates with the very module that it trains, whatever engine a run uses",
    ("stretto.cluster", "stretto.plane.ray_plane"): "owns the ledger's process",
    ("stretto.actor_ranks", "stretto.plane.ray_plane"): "hands the consumers' side to Ray actors",
    ("stretto.rollout_process", "stretto.plane.ray_plane"): "hosts the producer's side of a plane in a Ray actor",
    ("stretto.remote", "stretto.plane.ray_plane"): "knows how Ray wraps an error",
}


def unit_of(module: str) -> str:
    """``stretto.rollout.hf`` belongs to unit ``rollout``."""
    return module.split(".")[1] if "." in module else ""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str, module: str, is_package: bool = False) -> set[str]:
    """Every stretto module that a source text imports, anywhere in it, ``from stretto import x`` and relative ones
    resolved. Imports for type checkers alone count too: a layer must not need to know the names above it.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            target = ".".join(p for p in (base, node.module) if p)
            found |= {f"{target}.{alias.name}" for alias in node.names} if target == "stretto" else {target}
            if target.startswith("stretto."):  # `from stretto.rollout import hf` may name a module
                found |= {f"{target}.{alias.name}" for alias in node.names if exists(f"{target}.{alias.name}")}
    return {name for name in found if name.split(".")[0] == "stretto" and name != "stretto"}


def exists(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def violations(module: str, imported: set[str]) -> list[str]:
    """Why a module may not import what it does; empty where it may."""
    unit = unit_of(module)
    found = []
    for target in sorted(imported):
        other = unit_of(target)
        if other == unit or unit == "cli":
            continue
        if other == "cli":
            found.append(f"{module} imports {target}: nothing imports the CLI")
        elif unit in PROOFS or other in PROOFS:
            if unit in PROOFS and other in STAGES:
                found.append(f"{module} imports {target}: parity and bench stay out of the stages")
            elif other in PROOFS and unit not in PROOFS:
                found.append(f"{module} imports {target}: runs do not know how they are compared")
        elif unit not in LEVEL or other not in LEVEL:
            found.append(f"{module} imports {target}: {unit if unit not in LEVEL else other} has no layer; give it one")
        elif unit in BASE and other in BASE:
            if other not in WITHIN_BASE[unit]:
                found.append(f"{module} imports {target}: {unit} may import {sorted(WITHIN_BASE[unit])}")
        elif unit in STAGES and other in STAGES:
            found.append(f"{module} imports {target}: stages meet in types.py, never in one another")
        elif LEVEL[other] > LEVEL[unit]:
            found.append(f"{module} imports {target}: a lower layer imports a higher one")
        elif target in IMPLEMENTATIONS and unit != "build" and (module, target) not in EXCEPTIONS:
            found.append(f"{module} imports {target}: build.py alone picks implementations")
    return found


def test_every_import_of_the_package_obeys_the_layers():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = module_name(path)
        imported = imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        found += violations(module, imported)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stretto.actor.worker", "from stretto.rollout.engine import Sampling"),
        ("stretto.actor.worker", "def f():\n    import stretto.plane"),
        ("stretto.actor.worker", "from ..data import digits"),
        ("stretto.rollout.hf", "from stretto import switches"),
        ("stretto.rollout.hf", "from stretto.switches.base import Switch"),
        ("stretto.models.loading", "from stretto.actor.loss import loss"),
        ("stretto.observe.trace", "from stretto import loop"),
        ("stretto.config", "import stretto.settings"),
        ("stretto.types", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stretto.config import Config"),
        ("stretto.loop", "from stretto.cli import main"),
        ("stretto.loop", "from stretto.rollout.hf import HFEngine"),
        ("stretto.loop", "from stretto.rollout import hf"),
        ("stretto.bench.run", "from stretto.actor.worker import ActorRank"),
        ("stretto.loop", "from stretto.somewhere_new import thing"),
    ],
)
def test_an_import_against_the_layers_is_found(module, source):
    assert violations(module, imports_of(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "stretto.actor.worker",
            "import torch\nfrom stretto.types import Mini\nfrom stretto.observe import trace",
        ),
        ("stretto.actor.worker", "from stretto.actor import loss\nfrom .forward import forward"),
        ("stretto.build", "from stretto.rollout.hf import HFEngine\nfrom stretto.switches.base import Switch"),
        ("stretto.loop", "from stretto.rollout.engine import Sampling"),
        ("stretto.cli", "from stretto.bench import run\nfrom stretto.loop import train"),
        ("stretto.switches.base", "from stretto.config import Config"),
    ],
)
def test_an_import_along_the_layers_is_allowed(module, source):
    assert violations(module, imports_of(source, module)) == []


def test_no_exception_outlives_its_import():
    for module, target in EXCEPTIONS:
        path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        assert target in imports_of(path.read_text(encoding="utf-8"), module), f"{module} no longer needs {target}"


def test_every_unit_of_the_package_has_a_layer():
    units = {unit_of(module_name(path)) for path in PACKAGE.rglob("*.py")} - {""}
    assert units <= LEVEL.keys() | PROOFS | {"cli"}


def test_options_and_records_load_without_torch_ray_or_transformers():
    code = (
        "import sys, stretto.config, stretto.types, stretto.settings, stretto.checks, stretto.compat\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'vllm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
