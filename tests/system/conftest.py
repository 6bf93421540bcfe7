"""One embedded Ray for all system tests of a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.compat import ray_on_loopback, ray_without_onlookers

# Small cases (plane_case, tiny, …) serve the unit and the system tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from processes import wait_until_gone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that looks at /dev/shm or at a Ray of its own session must be alone on the machine."""
    for item in items:
        if {"marked", "ray_session"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("alone")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray with 8 logical CPUs and 300 MB of object store, on loopback; shut down when the session ends."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import ray

    with ray_on_loopback(), ray_without_onlookers():
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=300 * 1024 * 1024,
            log_to_driver=False,
            configure_logging=False,
        )
    yield
    ray.shutdown()


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose processes can be told by their environment; /dev/shm must be as before when it has ended."""
    run = tmp_path / "run"
    before = set(os.listdir("/dev/shm"))
    monkeypatch.setenv("TEST_RUN", str(run))
    yield run
    monkeypatch.delenv("TEST_RUN")
    wait_until_gone(run)
    assert set(os.listdir("/dev/shm")) <= before
