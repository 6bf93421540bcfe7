"""Dynamic sampling through the command: which prompts it trains, and that a resumed run goes on at the same one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import rewards
import running
from test_training import assert_same_run

from stretto.data.cursor import row_at
from stretto.data.source import open_source
from stretto.observe.raw import read_raw
from stretto.settings import load

pytestmark = pytest.mark.timeout(900)


def recipe(folder: Path, **rollout: int) -> Path:
    """Odd rows have equal rewards, so that about half of the prompts are dropped."""
    table = {"prompts_per_partition": 8, "n_samples_per_prompt": 4, "groups_per_decode_batch": 3}
    return running.recipe(
        folder,
        rollout={**table, "max_response_tokens": 8, "refill_rounds": 12, **rollout},
        reward={"function": "rewards:even_rows_differ"},
        staleness={"max": 1},
    )


@pytest.mark.long
def test_a_run_stopped_and_resumed_trains_the_same_prompts_to_the_same_bits(tmp_path):
    folders = [tmp_path / name for name in ("straight", "stopped")]
    for folder in folders:
        folder.mkdir()
    straight, stopped = (folder / "run" for folder in folders)
    running.train(recipe(folders[0]))
    process = running.start(recipe(folders[1]))
    running.wait_for(process, "update 2/5")
    process.send_signal(signal.SIGTERM)
    output = running.finish(process)
    assert process.returncode == 143 and "nothing is lost" in output, output
    running.train(recipe(folders[1], refill_rounds=20), "--resume")  # another number, which changes nothing
    assert_same_run(straight, stopped)
    assert_the_next_prompts_that_say_something(folders[0] / "recipe.toml", straight)


def assert_the_next_prompts_that_say_something(path: Path, run: Path) -> None:
    """By the rows that the rewards of trained samples tell: in prompt order, none twice, and between them as many
    prompts as were dropped, all odd rows among those.
    """
    config, _ = load(path, [], {})
    source = open_source(config.data, "train")
    rows = [row_at(at, len(source), config.run.seed, config.data.shuffle)[1] for at in range(200)]
    numbers = [rewards.row_of(source[row].row_id) for row in rows]
    at, metrics = 0, running.jsonl(run, "metrics.jsonl")
    for k in range(5):
        begun, trained = at, read_raw(run, k)["rewards"][::4].astype(int).tolist()
        assert len(trained) == 8 and all(number % 2 == 0 for number in trained)
        for number in trained:
            at = numbers.index(number, at) + 1
        assert at - begun == 8 + metrics[k]["rollout_dropped_groups"]
        assert metrics[k]["zero_signal_groups"] == 0 and metrics[k]["samples"] == 32
    assert sum(row["rollout_dropped_groups"] for row in metrics) >= 10
    state = json.loads((run / "checkpoints/step_000005/state.json").read_text())
    assert state["extra"]["position"] == at
