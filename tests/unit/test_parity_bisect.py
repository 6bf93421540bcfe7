"""``stretto parity compare`` as a command: its exit codes, what it writes, and what it says of runs that ran again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import parity_case
import pytest
from parity_case import copy, edit_columns, edit_session, flip_bit
from typer.testing import CliRunner

from stretto.cli import app
from stretto.config import Config
from stretto.observe import dump
from stretto.observe.dump import write_dump
from stretto.observe.raw import RawLog
from stretto.parity import bisect, rerun
from stretto.parity.compare import compare
from stretto.parity.folder import RunFolder
from stretto.parity.rerun import refusals, repeated
from stretto.types import StrettoError

NAME = "model.visual.merger.norm.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return parity_case.write_run(tmp_path_factory.mktemp("parity") / "a")


@pytest.fixture(scope="module")
def flipped(tmp_path_factory) -> Path:
    """A run with one other bit in a parameter after update 1."""

    def fault(work: parity_case.Work) -> None:
        flip_bit(work.actor.trainer.master.named()[NAME].numpy(), 3)

    return parity_case.write_run(tmp_path_factory.mktemp("parity") / "b", faults={"phase 3": fault})


def command(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["parity", "compare", *map(str, arguments)])
    return result.exit_code, result.output


# Dumps -------------------------------------------------------------------------------------------------------------


def test_elements_that_differ_are_counted_and_the_first_is_named():
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    b = a.copy()
    b[1, 0, 2] += 0.5  # element 14
    b[1, 2, 3] -= 2.0
    same = np.ones(3, np.float32)
    zeros = [np.array([0.0, sign * 0.0], np.float32) for sign in (1, -1)]
    found = bisect.differences(
        {"gradients.w": a, "parameters.v": same, "parameters.z": zeros[0]},
        {"gradients.w": b, "parameters.v": same, "parameters.z": zeros[1]},
    )
    assert [(d.kind, d.name) for d in found] == [("gradients", "w"), ("parameters", "z")]
    assert (found[0].differing, found[0].index, found[0].a, found[0].b) == (2, (1, 0, 2), 14.0, 14.5)
    assert found[0].largest == 2.0
    assert (found[1].differing, found[1].index, found[1].largest) == (1, (1,), 0.0)
    assert (
        "gradients w [2, 3, 4]: 2 of 24 elements differ, the first at [1, 0, 2]: 14.0 against 14.5" in found[0].told()
    )


def test_a_value_that_is_not_a_number_is_infinitely_far():
    a, b = np.zeros(3, np.float32), np.array([0, np.nan, 0], np.float32)
    assert bisect.differences({"gradients.w": a}, {"gradients.w": b})[0].largest == np.inf
    assert bisect.differences({"gradients.w": b}, {"gradients.w": b.copy()}) == []


@pytest.mark.parametrize("other", [{}, {"gradients.w": np.zeros((2, 1), np.float32)}])
def test_dumps_of_other_tensors_are_refused(other):
    with pytest.raises(StrettoError, match=r"'gradients\.w' for one"):
        bisect.differences({"gradients.w": np.zeros(2, np.float32)}, other)


def cut_short(path: Path) -> None:
    path.write_bytes(b"half of it")
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "save_file", lambda _tensors, path: cut_short(path))
    with pytest.raises(StrettoError, match="No space left"):
        write_dump(tmp_path, 1, 0, 1, {"gradients.w": np.zeros(2, np.float32)})
    assert not list((tmp_path / "dump").iterdir())
    log = RawLog(tmp_path)
    columns = {"global_index": np.arange(2), "lengths": np.ones(2, np.int32)}
    write_bytes = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        write_bytes(self, data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        log.write(1, columns)
    assert not list((tmp_path / "raw").iterdir())


# Running again -----------------------------------------------------------------------------------------------------


def test_a_repetition_ends_after_the_partition_and_dumps_it(tmp_path):
    config = Config().with_seams(record="x", record_partitions=2, replay="y", phase1="chunks")
    again = repeated(config, tmp_path / "again", 3)
    assert again.run.dir == str(tmp_path / "again") and again.eval.every == 0
    seams = again.seams
    assert (seams.partitions, seams.dump_partition, seams.checkpoints, seams.record) == (4, 3, False, "")
    assert (seams.replay, seams.phase1) == ("y", "chunks")
    assert again.run.updates == config.run.updates  # the learning rate follows it


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": {"run": {"determinism": "fast"}}}, "it need not end with the same numbers"),
        ({"config": {"seams": {"replay": "/none/such"}}}, "there is no recording in /none/such"),
        ({"directory": "/none/such"}, "it ran in /none/such"),
    ],
)
def test_a_run_that_cannot_be_repeated_is_refused_with_the_reason(run, tmp_path, change, said):
    (reason,) = refusals(RunFolder(edit_session(copy(run, tmp_path / "b"), **change)))
    assert said in reason
    assert list(refusals(RunFolder(run))) == []


def test_an_interrupted_bisection_lets_its_run_end(run, tmp_path, monkeypatch):
    """The child cleans up for longer than ``subprocess.run`` waits before it kills."""
    source = RunFolder(edit_session(copy(run, tmp_path / "b"), directory=str(tmp_path)))
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, time\n"
        "try:\n    pathlib.Path('began').touch(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(1); pathlib.Path('cleaned').touch()\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def press() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        rerun.start(source, tmp_path / "again", 1)
    assert (tmp_path / "cleaned").exists()


def test_a_run_that_went_on_under_other_switches_is_refused(run, tmp_path):
    folder = copy(run, tmp_path / "b")
    data = json.loads((folder / "manifest.json").read_text())
    data["sessions"].append(json.loads(json.dumps(data["sessions"][0])))
    (folder / "manifest.json").write_text(json.dumps(data))
    assert list(refusals(RunFolder(folder))) == []
    edit_session(folder, config={"switches": {"logprob_reuse": True}})
    (reason,) = refusals(RunFolder(folder))
    assert "resumed with other options" in reason


def test_bisect_names_the_element(run, flipped, tmp_path, monkeypatch):
    """The runs that run again are stood in for by what they would write."""

    def start(source: RunFolder, run_dir: Path, partition: int) -> None:
        assert partition == 1
        shutil.copytree(source.path, run_dir)
        values = np.full(32, 0.5, np.float32)
        if source.path == flipped:
            flip_bit(values, 3)
        write_dump(run_dir, 1, 0, 1, {f"parameters.{NAME}": values, "gradients.w": np.zeros(2, np.float32)})

    monkeypatch.setattr(bisect, "start", start)
    notes: list[str] = []
    found = bisect.bisect(compare(run, flipped), tmp_path / "again", notes.append)
    assert (found.update, found.compared, len(notes), found.astray) == (1, 2, 2, ())
    (tensor,) = found.tensors
    assert (tensor.kind, tensor.name, tensor.differing, tensor.index) == ("parameters", NAME, 1, (3,))
    assert tensor.largest == pytest.approx(2**-24) and NAME in found.text()
    with pytest.raises(StrettoError, match="again exists"):
        bisect.bisect(compare(run, flipped), tmp_path / "again", notes.append)


def test_a_run_that_does_not_repeat_is_said_to_have_gone_astray(run, flipped, tmp_path, monkeypatch):
    def start(source: RunFolder, run_dir: Path, partition: int) -> None:
        shutil.copytree(run, run_dir)
        write_dump(run_dir, partition, 0, 1, {"gradients.w": np.zeros(2, np.float32)})

    monkeypatch.setattr(bisect, "start", start)
    found = bisect.bisect(compare(run, flipped), tmp_path / "again", lambda _: None)
    (line,) = found.astray
    assert line.startswith(f"{flipped} does not repeat: at update 1 another parameters")
    assert found.tensors == () and "does not repeat" in found.text()


def test_equal_runs_have_nothing_to_bisect(run, tmp_path):
    assert bisect.bisect(compare(run, copy(run, tmp_path / "b")), tmp_path / "again") is None
    assert not (tmp_path / "again").exists()


def test_hashes_that_are_absent_are_not_equal(run, flipped, tmp_path):
    other = copy(flipped, tmp_path / "b")
    for k in range(2):
        edit_columns(other, k, lambda c: [c.pop(name) for name in list(c) if name.startswith("hash.")])
    for k in range(2):
        for name in ("parameters", "gradients", "optimizer"):
            parity_case.edit_line(other, "fingerprints.jsonl", k, lambda line, name=name: line.pop(name, None))
    verdict = compare(run, other)
    assert bisect.first_update(verdict) is None
    said = bisect.nothing(verdict)
    assert "gradients absent: the second run has no hashes of its gradients on record at update 0" in said
    assert "parameters absent" in said and "optimizer state absent" in said and "equal" not in said


def test_the_optimizers_state_alone_is_in_no_dump(run, tmp_path):
    def fault(work: parity_case.Work) -> None:
        state = work.actor.trainer.optimizer_tensors()
        flip_bit(state[next(name for name in state if name.startswith(NAME) and "sq" in name)].numpy(), 3)

    verdict = compare(run, parity_case.write_run(tmp_path / "b", faults={"phase 3": fault}))
    assert bisect.bisect(verdict, tmp_path / "again") is None and not (tmp_path / "again").exists()
    said = bisect.nothing(verdict)
    assert "only the optimizer's state differs, which dumps do not hold" in said and NAME in said and "update 1" in said


# The command -------------------------------------------------------------------------------------------------------


def test_the_command_exits_with_the_verdict(run, flipped, tmp_path):
    again = copy(run, tmp_path / "again")
    code, output = command(run, flipped, "--control", again, "--out", tmp_path / "out")
    assert code == 1
    assert f"first divergence: parameters: update 1, parameters, tensor {NAME}" in " ".join(output.split())
    assert json.loads((tmp_path / "out/parity.json").read_text())["exit_code"] == 1
    assert (tmp_path / "out/parity.md").read_text().startswith("# Parity: B against B")
    assert command(run, again)[0] == 0
    control = edit_columns(copy(run, tmp_path / "c"), 0, lambda c: parity_case.nudge(c["old_logprobs"], 0))
    code, output = command(run, again, "--control", control)
    assert code == 3 and "undecidable" in output


@pytest.mark.parametrize("names", ["aa", "aba", "abb"])
def test_the_command_refuses_a_run_that_is_named_twice(run, tmp_path, names):
    folders = {"a": run, "b": copy(run, tmp_path / "b")}
    a, b, *control = (folders[name] for name in names)
    code, output = command(a, b, *(["--control", control[0]] if control else []))
    assert code == 2 and "are one folder" in " ".join(output.split())


def test_the_command_refuses_runs_that_do_not_compare(run, tmp_path):
    other = edit_session(copy(run, tmp_path / "b"), config={"run": {"seed": 3}})
    code, output = command(run, other)
    assert code == 2 and "run.seed: 0 in" in output and "Traceback" not in output


def test_what_could_not_be_compared_is_no_row_that_failed(run, flipped, tmp_path):
    code, output = command(run, tmp_path / "none")
    assert code == 2 and "is no manifest of a run" in " ".join(output.split())
    gone = edit_session(copy(flipped, tmp_path / "gone"), directory="/none/such")
    code, output = command(run, gone, "--out", tmp_path / "out", "--bisect")
    assert code == 2 and "no bisection" in output
    assert json.loads((tmp_path / "out/parity.json").read_text())["exit_code"] == 1


def test_bisect_needs_a_folder(run):
    result = CliRunner().invoke(app, ["parity", "compare", str(run), str(run), "--bisect"])
    assert "name a folder with --out" in str(result.exception)
