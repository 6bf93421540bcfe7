"""``stretto parity check`` apart from real runs: what it plans, keeps, draws, reports and how it ends."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from PIL import Image
from safetensors.numpy import save_file
from typer.testing import CliRunner

from stretto.cli import app, main
from stretto.config import Config
from stretto.observe.dump import GRADIENTS
from stretto.observe.hardware import hardware
from stretto.parity import curves, report
from stretto.parity.cells import Cells, Done, left_s
from stretto.parity.check import against_float64, engaged, referenced, settled
from stretto.parity.inputs import code_of, inputs
from stretto.parity.plan import (
    BASE,
    REPORT_FILES,
    Cell,
    Plan,
    Question,
    make_plan,
    parse_conditions,
    parse_ranks,
    switch_sets,
)
from stretto.parity.report import Compared, Engaged, Grid, Referenced, Report, cell_text
from stretto.parity.table import strict
from stretto.parity.verdict import Difference, Distance, Incomparable, Row, RunName, Verdict
from stretto.preflight import Examination
from stretto.preflight.case import Finding
from stretto.problems import Problem
from stretto.resume import locked
from stretto.settings import load
from stretto.types import ConfigError, StrettoError

OUT = Path("out")


def plan(**changes) -> Plan:
    question = Question(recipe="r.toml", out=OUT, **{"conditions": (BASE, "P+S"), "updates": 4, "workers": 2} | changes)
    return make_plan(question, Config())


# What is run ---------------------------------------------------------------------------------------------------------


def test_the_runs_of_a_small_check_are_these():
    off = "--set switches.processor_pool=0 --set switches.logprob_reuse=false --set switches.chunk_overlap=false"
    p_s = "--set switches.processor_pool=2 --set switches.logprob_reuse=false --set switches.chunk_overlap=true"
    live = "--set eval.every=0 --set actor.lr=0.1"
    replay = "--set actor.data_parallel=1 --set run.determinism=exact"
    assert [cell.command for cell in plan(sets=("actor.lr=0.1",)).cells] == [
        f"stretto parity record r.toml out/recording --partitions 2 --updates 4 {live} {off} "
        "--set run.dir=out/live/B --set run.updates=4",
        f"stretto train r.toml --no-checkpoints {live} {off} --set run.dir=out/live/B-again --set run.updates=4",
        f"stretto train r.toml --no-checkpoints {live} {p_s} --set run.dir=out/live/P+S --set run.updates=4",
        f"stretto parity replay out/recording out/replay/1/B {replay} {off} --dump 0",
        f"stretto parity replay out/recording out/replay/1/B-again {replay} {off}",
        f"stretto parity replay out/recording out/replay/1/P+S {replay} {p_s}",
    ]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_live_run_of_a_check_writes_no_checkpoint_at_its_end(monkeypatch, checkpoints):
    started = []
    monkeypatch.setattr("stretto.preflight.checked", lambda _, sets, *, seams: (Config(seams=seams), {}))
    monkeypatch.setattr("stretto.training.interruptible", nullcontext)
    monkeypatch.setattr("stretto.training.train", lambda config, _, *, resume, left: started.append((config, left)))
    words = list(plan().cells[1].words)
    if checkpoints:
        words.remove("--no-checkpoints")
    assert CliRunner().invoke(app, words).exit_code == 0
    ((config, left),) = started
    assert config.seams.checkpoints is checkpoints
    assert ("this run writes no checkpoints" in left(3, 0)) is not checkpoints


def test_each_run_is_compared_with_the_baseline_of_its_kind_and_number_of_ranks():
    pairs = [(p.base.name, p.other.name, p.control.name, p.partitions) for p in plan(ranks=(1, 4)).comparisons]
    one, four = "replay, 1 rank: ", "replay, 4 ranks: "
    assert pairs == [
        ("live: B", "live: B again", "live: B again", None),
        ("live: B", "live: P+S", "live: B again", None),
        ("live: B", f"{one}B", "live: B again", 2),
        (f"{one}B", f"{one}B again", f"{one}B again", None),
        (f"{one}B", f"{one}P+S", f"{one}B again", None),
        (f"{four}B", f"{four}B again", f"{four}B again", None),
        (f"{four}B", f"{four}P+S", f"{four}B again", None),
        (f"{one}B", f"{four}B", f"{one}B again", None),
    ]


def test_a_replay_on_other_ranks_is_not_held_against_the_recorded_run():
    assert all(pair.base.replay == pair.other.replay for pair in plan(ranks=(2,)).comparisons)


def test_names_of_conditions_and_ranks_are_read_or_refused():
    assert parse_conditions("P,B, P+R,S+P,P") == ("B", "P", "P+R", "P+S")
    assert parse_ranks("1,4,1") == (1, 4)
    for wrong in ("Q", "P+P", "P+", "b"):
        with pytest.raises(ConfigError, match="expected B, or letters of P, R, S"):
            parse_conditions(wrong)
    for wrong in ("0", "", "1,x", "-1", "1.5"):
        with pytest.raises(ConfigError, match="expected numbers of ranks"):
            parse_ranks(wrong)


def test_what_is_not_on_is_switched_off_whatever_the_recipe_says():
    assert switch_sets("P+R", 3) == [
        "switches.processor_pool=3",
        "switches.logprob_reuse=true",
        "switches.chunk_overlap=false",
    ]


@pytest.mark.parametrize("partitions", [0, 5])
def test_more_partitions_than_are_trained_cannot_be_recorded(partitions):
    with pytest.raises(ConfigError, match=f"--record-partitions = {partitions}, and --updates = 4 train 4"):
        plan(record_partitions=partitions)


def test_a_condition_that_a_guard_refuses_is_refused_before_anything_runs(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f"[model]\nconfig = {json.dumps(tiny.BLOCK).replace(': ', ' = ')}\n"
        "[algorithm]\nkl_loss_coef = 0.1\n[switches]\nchunk_overlap = true\n"
    )
    question = Question(recipe=str(recipe), out=tmp_path / "out", conditions=(BASE, "P", "P+R", "R+S"))
    with pytest.raises(ConfigError) as caught:
        settled(question)
    text = "\n".join(caught.value.problems)
    assert "condition P+R: R: algorithm.kl_loss_coef" in text
    assert "condition R+S:" in text and "condition P:" not in text
    assert "--conditions" in text
    assert not (tmp_path / "out" / "live").exists()


def test_ranks_that_cannot_run_are_refused_before_anything_runs(monkeypatch):
    asked = []

    def examined(recipe, sets, seams):
        """Of which more than two ranks cannot run."""
        config, _ = load(None, [text for text in sets if not text.startswith("run.dir")], {})
        asked.append(config.actor.data_parallel)
        assert not seams.checkpoints
        few = config.actor.data_parallel <= 2
        problems = () if few else (Problem(("actor.data_parallel",), f"no {asked[-1]} GPUs"),)
        return Examination(config, {}, (Finding("machine", problems, 1),))

    monkeypatch.setattr("stretto.parity.check.examine", examined)
    question = Question(recipe="r", out=OUT, sets=("model.path=org/model",), ranks=(1, 2))
    assert settled(replace(question, conditions=(BASE,))).actor.data_parallel == 1
    assert asked == [1, 2]
    with pytest.raises(ConfigError) as caught:
        settled(replace(question, conditions=(BASE,), ranks=(3, 1, 4)))
    assert caught.value.problems == ["--ranks 3: no 3 GPUs", "--ranks 4: no 4 GPUs"]
    assert caught.value.exit_code == 1


# What runs read ------------------------------------------------------------------------------------------------------


def reading(folder: Path) -> tuple[Config, list[Path]]:
    """A config whose runs read files in ``folder``, and these files."""
    names = [
        "teacher/w",
        "images/a/1.png",
        "train.jsonl",
        "own_reward.py",
        "own_hooks/__init__.py",
        "own_hooks/deep.py",
    ]
    files = [folder / name for name in ("model/w", *names)]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")
    tables = {
        "model": {"path": str(folder / "model")},
        "algorithm": {"teacher": str(folder / "teacher")},
        "data": {
            "source": "files",
            "train_files": (str(folder / "train.jsonl"),),
            "image_folder": str(folder / "images"),
        },
        "reward": {"function": "own_reward:score"},
        "actor": {"before_logprob_hook": "own_hooks.deep:route"},
    }
    return Config.model_validate(tables), files


@pytest.mark.parametrize("number", range(7))
def test_another_file_of_those_that_runs_read_makes_them_anew(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    config, files = reading(tmp_path)
    before = inputs(config)
    assert inputs(config) == before
    files[number].write_text("other")
    after = inputs(config)
    assert sum(before[name] != after[name] for name in before) == 1


def test_what_runs_read_need_not_be_there():
    assert inputs(Config()) == {"model": [], "teacher": [], "images": [], "data": [], "reward": "", "hook": ""}
    assert code_of("no_such_module_of_anyone:f") == ""


# What is kept --------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, pathlib, sys, time
words = sys.argv[1:]
run = pathlib.Path(next((w.split("=", 1)[1] for w in words if w.startswith("run.dir=")), words[3]))
if "record" in words:
    recording = pathlib.Path(words[3])
    recording.mkdir(parents=True)
    (recording / "record.json").write_text(str(time.time_ns()))
    (recording / "partition-0").write_text("rollouts")
assert not run.exists()
run.mkdir(parents=True)
if "--dump" in words:
    (run / "dump").mkdir()
    (run / "dump" / "rank-0").write_text("gradients")
behave = pathlib.Path({behave!r})
how = behave.read_text() if behave.exists() else "finished"
with open({log!r}, "a") as log:
    log.write(run.name + " " + words[0] + "\\n")
(run / "manifest.json").write_text(json.dumps({{"format": 1, "sessions": [{{"status": how}}]}}))
print("something was said", flush=True)
if how == "hangs":
    time.sleep(600)
sys.exit("this went wrong" if how == "failed" else 0)
"""


class Stand:
    """Cells whose program only writes a manifest and notes that it ran."""

    def __init__(self, folder: Path):
        self.log, self.behave, self.out = folder / "ran", folder / "behave", folder / "out"
        self.program = (sys.executable, "-c", PROGRAM.format(log=str(self.log), behave=str(self.behave)))
        self.notes: list[str] = []

    @property
    def recording(self) -> Path:
        return self.out / "recording"

    def plan(self, **changes) -> Plan:
        question = Question(recipe="r", out=self.out, **{"conditions": (BASE,), "updates": 2} | changes)
        return make_plan(question, Config())

    def run(self, asked: int = 0, **changes) -> list[str]:
        """The names of what really ran."""
        self.log.unlink(missing_ok=True)
        cells = Cells(self.out, self.out / "recording", {"asked": asked}, self.notes.append, self.program)
        done = cells.run(self.plan(**changes).cells)
        ran = self.log.read_text().splitlines() if self.log.exists() else []
        assert sum(not each.kept for each in done) == len(ran)
        return ran


ALL = ["B parity", "B-again train", "B parity", "B-again parity"]
"""What runs of a check of B alone: the recorded live run, its control, two replays."""


@pytest.fixture
def stand(tmp_path) -> Stand:
    return Stand(tmp_path)


def test_finished_runs_are_kept_and_others_are_made_again(stand):
    assert stand.run() == ALL
    assert stand.run() == []
    (stand.out / "live" / "B-again" / "manifest.json").unlink()
    assert stand.run() == ["B-again train"]
    manifest = stand.out / "replay" / "1" / "B" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("finished", "running"))
    assert stand.run() == ["B parity"]


@pytest.mark.parametrize("number", [0, 3])  # the one that records, and a replay
def test_a_run_that_is_still_going_is_left_alone_and_named(stand, number):
    """A check that was killed leaves the run behind that it had started."""
    cell = stand.plan().cells[number]
    stand.recording.mkdir(parents=True)
    with locked(cell.run_dir):
        (cell.run_dir / "metrics.jsonl").touch()
        with pytest.raises(StrettoError, match=f"{re.escape(str(cell.run_dir))}.* is in use"):
            stand.run()
        assert (cell.run_dir / "metrics.jsonl").exists() and (stand.recording.exists() or number)
    (cell.run_dir / "metrics.jsonl").unlink()
    stand.run()
    assert stand.run() == []


def test_a_report_is_gone_once_runs_are_not_those_it_tells_of(stand):
    stand.run()
    for name in REPORT_FILES:
        (stand.out / name).write_text("passed")
    stand.run()
    assert all((stand.out / name).exists() for name in REPORT_FILES)
    (stand.out / "replay" / "1" / "B" / "manifest.json").unlink()
    stand.behave.write_text("failed")
    with pytest.raises(StrettoError):
        stand.run()
    assert not any((stand.out / name).exists() for name in REPORT_FILES)


def test_a_new_recording_makes_its_replays_anew_and_nothing_else(stand):
    stand.run()
    (stand.out / "live" / "B" / "manifest.json").unlink()
    assert stand.run() == ["B parity", "B parity", "B-again parity"]


@pytest.mark.parametrize(
    "lost", ["recording", "recording/record.json", "recording/partition-0", "replay/1/B/dump", "replay/1/B/dump/rank-0"]
)
def test_what_others_read_of_a_run_is_made_again_where_it_is_lost(stand, lost):
    stand.run()
    path = stand.out / lost
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    assert stand.run() == (["B parity"] if "dump" in lost else ["B parity", "B parity", "B-again parity"])
    assert stand.run() == []


def test_other_options_make_every_run_anew(stand):
    stand.run()
    assert stand.run(asked=1) == ALL
    assert stand.run(asked=1, ranks=(1, 2)) == ["B parity", "B-again parity"]  # only what is new
    assert len(stand.run(asked=1, updates=3)) == 4


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG"])
def test_another_environment_of_the_arithmetic_makes_every_run_anew(stand, monkeypatch, name):
    stand.run()
    monkeypatch.setenv(name, "7")
    assert stand.run() == ALL and stand.run() == []


@pytest.mark.parametrize(
    "facts", [{"cpu": "another"}, {"cores_usable": 3}, {"gpus": [{"name": "another", "driver": "1", "uuid": "x"}]}]
)
def test_another_machine_makes_every_run_anew(stand, monkeypatch, facts):
    here = hardware()
    monkeypatch.setattr("stretto.parity.cells.hardware", lambda: here | {"gpus": []})
    stand.run()
    monkeypatch.setattr("stretto.parity.cells.hardware", lambda: here | {"gpus": [], "memory_bytes": 1})
    assert stand.run() == []  # what no number depends on
    monkeypatch.setattr("stretto.parity.cells.hardware", lambda: here | {"gpus": []} | facts)
    assert stand.run() == ALL


def test_a_run_that_fails_is_shown_with_its_log_and_command_and_the_ones_before_are_kept(stand):
    stand.run()
    stand.behave.write_text("failed")
    (stand.out / "live" / "B-again" / "manifest.json").unlink()
    with pytest.raises(StrettoError) as caught:
        stand.run()
    text = str(caught.value)
    log = stand.out / "logs" / "live-B-again.log"
    assert "live: B again ended with exit code 1" in text and str(log) in text
    assert "  something was said\n  this went wrong" in text
    assert "stretto train r --no-checkpoints --set" in text
    stand.behave.unlink()
    assert stand.run() == ["B-again train"]


def test_a_stopped_check_takes_its_run_along(stand, monkeypatch):
    stand.behave.write_text("hangs")
    started: list[subprocess.Popen] = []
    pressed: list[bool] = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    def sleep(_: float, wait=time.sleep) -> None:
        wait(0.05)
        if stand.log.exists() and not pressed:  # once: waiting for the run to end sleeps, too
            pressed.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        stand.run()
    assert [process.returncode for process in started] == [-signal.SIGINT]


def test_time_left_is_the_median_of_the_like():
    cells = plan(ranks=(1, 4)).cells  # 3 live, then 3 and 3 replays
    walls = (40.0, 50.0, 48.0, 10.0)
    done = [Done(cell=cell, wall_s=wall, kept=False) for cell, wall in zip(cells, walls, strict=False)]
    # Two replays on one rank like the one before; three on four ranks, of which none is known: median of all, 44.
    assert left_s(done, cells[4:]) == 2 * 10 + 3 * 44
    assert left_s(done, []) == 0


# How it ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        StrettoError("live: B ended with exit code 1"),
        Incomparable("these runs do not compare"),
        ConfigError(["too little memory"], exit_code=1),
    ],
)
def test_a_check_that_shows_nothing_does_not_end_as_if_numbers_differed(monkeypatch, capsys, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("stretto.parity.check.check", fails)
    monkeypatch.setattr("stretto.training.interruptible", nullcontext)
    monkeypatch.setattr(sys, "argv", ["stretto", "parity", "check", "r.toml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and str(error) in capsys.readouterr().err


# Curves --------------------------------------------------------------------------------------------------------------


def metrics(folder: Path, **columns: list) -> Path:
    folder.mkdir()
    count = len(next(iter(columns.values())))
    names = [metric for metric, _ in curves.PANELS]
    rows = [{name: columns[name][i] if name in columns else 0.5 for name in names} for i in range(count)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_how_far_curves_are_apart_is_their_largest_difference_anywhere():
    def far(*values: list[float]) -> float:
        return curves.apart([curves.Curve("", "", np.array(v)) for v in values])

    nan = float("nan")
    assert far([1, 2], [1, 2], [1, 2]) == 0
    assert far([1, 2], [1, 2 + 2**-30], [1, 2]) == 2**-30
    assert far([1, 2], [0, 2], [1, 4]) == 2
    assert far([nan, 2], [nan, 3]) == 1  # neither has the first
    assert far([nan], [nan]) == 0
    assert np.isnan(far([nan, 2], [1, 2]))
    assert np.isnan(far([1, 2], [1]))


def test_every_curve_shows_where_all_lie_on_one_another(tmp_path):
    runs = {name: metrics(tmp_path / name, loss=[1.0, 0.5, 0.8]) for name in ("B", "B again", "P")}
    assert curves.draw(runs, tmp_path / "same.png", "t") == {metric: 0.0 for metric, _ in curves.PANELS}
    image = Image.open(tmp_path / "same.png").convert("RGB")
    panel = np.asarray(image)[: image.height // 2, : image.width // 3].reshape(-1, 3)  # of the loss, without the legend
    for colour in ("#D55E00", "#56B4E9", "#000000"):
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (panel == wanted).all(axis=1).sum() > 50, colour


def test_a_curve_that_differs_is_seen_and_measured(tmp_path):
    one = metrics(tmp_path / "one", loss=[1.0, 0.5], grad_norm=[1.0, None])
    other = metrics(tmp_path / "other", loss=[1.0, 0.75], grad_norm=[1.0, None])
    far = curves.draw({"B": one, "P": other}, tmp_path / "x.png", "t")
    assert far["loss"] == 0.25 and far["grad_norm"] == 0
    curves.draw({"B": one, "P": one}, tmp_path / "y.png", "t")
    assert (tmp_path / "x.png").read_bytes() != (tmp_path / "y.png").read_bytes()
    assert curves.apart_text(0.25) == "up to 0.25 apart" and curves.apart_text(0.0) == "all runs the same"


# Report --------------------------------------------------------------------------------------------------------------

LOSS = Distance(compared=4, differing=0, largest=0.0, unit="max abs")
DIFFERENCE = Difference(update=1, phase="phase 3", a=0.5, b=0.75, magnitude=0.25)
PASSES = Row(quantity="loss", phase="phase 3", required="exact", status="exact", distance=LOSS)
FAILS = Row(
    quantity="loss",
    phase="phase 3",
    required="exact",
    status="differs",
    distance=Distance(compared=4, differing=3, largest=0.25, unit="max abs"),
    first=DIFFERENCE,
)
UNDECIDABLE = Row(
    quantity="loss",
    phase="phase 3",
    required="exact",
    status="undecidable",
    distance=FAILS.distance,
    first=DIFFERENCE,
    control=Distance(compared=4, differing=1, largest=0.5, unit="max abs"),
)
ABSENT = Row(quantity="loss", phase="phase 3", required="exact", status="absent", distance=LOSS, note="no raw values")
ENGAGED = Engaged(cell="live: P+S", switch="S", ok=True, opportunity=True, facts=("2 of 2 chunk by chunk",))
NEAR = Referenced(ranks=1, largest=2e-6, relative=1e-7, tensor="w", bound=1e-5, first_ranks=1, from_first=3e-8)


def make_report(rows: list[Row], engaged: Engaged = ENGAGED, referenced: Referenced = NEAR) -> Report:
    small = plan()
    compared = [
        Compared(
            comparison=pair,
            verdict=Verdict(
                a=RunName(path=str(pair.base.run_dir), condition="B", replay=False),
                b=RunName(path=str(pair.other.run_dir), condition="P+S", replay=False),
                control=None,
                updates=4,
                topology={},
                rows=(row,),
            ),
        )
        for pair, row in zip(small.comparisons, rows, strict=False)
    ]
    return Report(
        question=Question(recipe="r.toml", out=OUT, conditions=(BASE, "P+S"), updates=4, ranks=(1,), sets=("a.b=1 2",)),
        plan=small,
        facts={"model": "tiny"},
        done=tuple(Done(cell=cell, wall_s=61.0, kept=False) for cell in small.cells),
        compared=tuple(compared),
        engaged=(engaged,),
        referenced=(referenced,),
        reference_note="",
        curves=None,
    )


@pytest.mark.parametrize(
    ("rows", "code", "headline"),
    [
        ([PASSES, PASSES], 0, "parity passed: of 2 rows 2 exact"),
        ([PASSES, FAILS], 1, "parity FAILED: of 2 rows 1 exact, 1 differ"),
        ([PASSES, UNDECIDABLE], 3, "parity undecidable: of 2 rows 1 exact, 1 undecidable"),
        ([UNDECIDABLE, FAILS], 1, "parity FAILED: of 2 rows 1 undecidable, 1 differ"),
        ([PASSES, ABSENT], 1, "parity FAILED: of 2 rows 1 exact, 1 absent"),
    ],
)
def test_one_row_decides_how_the_command_ends(rows, code, headline):
    found = make_report(rows)
    assert (found.exit_code, found.headline) == (code, headline)
    assert found.plain()["exit_code"] == code
    assert headline in report.markdown(found) and report.text(found).endswith(headline)


def test_a_switch_that_did_nothing_fails_the_check_unless_there_was_nothing_to_do():
    idle = Engaged(cell="live: P+S", switch="S", ok=False, opportunity=True, facts=("0 of 4 chunk by chunk",))
    found = make_report([PASSES], engaged=idle)
    assert found.exit_code == 1 and "live: P+S: S DID NOT ENGAGE: 0 of 4 chunk by chunk" in report.text(found)
    nothing = Engaged(cell="live: P+S", switch="S", ok=False, opportunity=False, facts=())
    assert make_report([PASSES], engaged=nothing).exit_code == 0 and "S had nothing to do" in nothing.text


def claims(folder: Path, count: int) -> Path:
    """A run whose only partition was claimed in ``count`` parts, after the first of which its last group was put; it
    was forwarded when all was there.
    """
    second = 10**9
    spans = [("loop.claim", i * second, (i + 1) * second, {"chunk": i, "chunks": 2}) for i in range(count)]
    put_ns = 3 * second if count > 1 else second // 2
    spans += [
        ("plane.put", put_ns - 1, put_ns, {"group": 0}),
        ("actor.forward", 4 * second, 5 * second, {"role": "old"}),
    ]
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text(
        "".join(
            json.dumps({"type": "span", "name": name, "start_ns": a, "end_ns": b, "partition": 0, **attrs}) + "\n"
            for name, a, b, attrs in spans
        )
    )
    return folder


@pytest.mark.parametrize(
    ("ranks", "count", "failed"),
    [
        (0, 1, True),  # live, and no S at all
        (1, 1, True),
        (0, 2, True),  # claimed by chunk, and nothing was forwarded meanwhile
        (1, 2, False),  # of a replay that is not asked
    ],
)
def test_s_is_at_work_only_where_partitions_are_claimed_by_chunk(tmp_path, ranks, count, failed):
    run_dir = claims(tmp_path / "run", count)
    (found,) = engaged(Cell(condition="S", ranks=ranks, run_dir=run_dir, partitions=1, words=()))
    assert found.failed is failed and found.ok is not failed
    assert ("DID NOT ENGAGE" in found.text) is failed


def with_topology(found: Report, place: int, **topology) -> Report:
    compared = list(found.compared)
    verdict = replace(compared[place].verdict, topology=topology, notes=("a reason",))
    compared[place] = replace(compared[place], verdict=verdict)
    return replace(found, compared=tuple(compared))


def test_runs_of_two_machines_fail_a_check_whatever_their_rows_say():
    found = with_topology(make_report([PASSES, PASSES]), 1, hardware=("one", "another"))
    assert found.exit_code == 1 and "1 pairs of runs were not made alike" in found.headline
    (line,) = report.failures(found)
    assert line.startswith("live, P+S: not made alike") and line.endswith("hardware one against another")
    text = report.markdown(found)
    assert "- P+S: not alike in hardware one against another\n- P+S: a reason\n" in text


def test_replays_on_other_ranks_need_not_be_alike():
    small = plan(ranks=(1, 2))
    (across,) = [pair for pair in small.comparisons if pair.across]
    found = make_report([PASSES])
    found = replace(found, compared=(replace(found.compared[0], comparison=across),))
    found = with_topology(found, 0, **{"actor.data_parallel": (1, 2)})
    assert found.exit_code == 0 and not report.failures(found)
    assert "not alike in actor.data_parallel 1 against 2" in report.markdown(found)


@pytest.mark.parametrize("relative", [2e-5, float("nan")])
def test_gradients_far_from_float64_fail_the_check(relative):
    far = Referenced(ranks=4, largest=1.0, relative=relative, tensor="w", bound=1e-5, first_ranks=1, from_first=3e-8)
    found = make_report([PASSES], referenced=far)
    (line,) = report.failures(found)
    assert found.exit_code == 1 and "4 ranks: relative l2 distance" in line and "from those on 1 rank 3e-08" in line


def dumped(folder: Path, *values: float) -> Cell:
    """A replay of B that has dumped gradients."""
    (folder / "dump").mkdir(parents=True)
    tensors = {f"{GRADIENTS}w": np.array(values, np.float32)}
    save_file(tensors, folder / "dump" / "update_000000-rank-0-of-1.safetensors")
    return Cell(condition=BASE, ranks=1, run_dir=folder, partitions=1, words=())


def test_gradients_that_are_no_numbers_fail_the_check_and_leave_the_rest_of_the_report(tmp_path):
    reference = {f"{GRADIENTS}w": np.array([3.0, 4.0])}
    good, bad = dumped(tmp_path / "good", 3, 4.5), dumped(tmp_path / "bad", float("nan"), 4)
    assert referenced(good, good, 0.2, reference).relative == 0.1 and not referenced(good, good, 0.2, reference).failed
    assert not referenced(good, good, 0.2, reference).problem
    for cell in (bad, replace(good, run_dir=tmp_path / "none")):
        far = referenced(cell, good, 0.2, reference)
        found = make_report([PASSES], referenced=far)
        (line,) = report.failures(found)
        assert found.exit_code == 1 and "FAILED, there is no distance: " in line
        assert ("not finite" if cell is bad else "no whole dump") in line
        assert "| loss | exact |" in report.markdown(found) and json.dumps(strict(found.plain()), allow_nan=False)


def test_a_reference_that_cannot_be_made_fails_the_check_for_each_number_of_ranks(stand):
    small, cells = stand.plan(ranks=(1, 2)), Cells(stand.out, stand.recording, {}, stand.notes.append)
    question = Question(recipe="r", out=stand.out)
    found = against_float64(question, small, Config(), cells)  # of a recording that is not there
    assert [(each.ranks, each.failed) for each in found] == [(1, True), (2, True)]
    assert all("stretto.parity.reference ended with exit code 1" in each.text for each in found)


def test_the_report_names_what_failed_first_and_how_to_repeat_it():
    found = make_report([PASSES, FAILS])
    text = report.markdown(found)
    assert text.index("## What failed") < text.index("## Live")
    (line,) = report.failures(found)
    assert line.startswith("live, P+S: ") and "loss" in line and "0.75" in line
    assert "stretto parity compare out/live/B out/live/P+S --control out/live/B-again" in text
    for cell in found.plan.cells:
        assert cell.command in text
    assert "stretto parity check r.toml --out out --conditions B,P+S --ranks 1 --updates 4" in text
    assert "--set 'a.b=1 2'" in text
    assert "| loss | exact | DIFFERS 0.25 |" in text


def test_the_first_divergence_is_the_cause_of_the_rest():
    def row(quantity: str, update: int = 1, sample: int = 0, token: int | None = None, phase: str = "inputs") -> Row:
        first = Difference(update=update, phase=phase, a=1, b=2, sample=sample, token=token)
        return Row(
            quantity=quantity, phase=phase, required="exact", status="differs", distance=FAILS.distance, first=first
        )

    def first(*rows: Row) -> str:
        run = RunName(path="", condition="B", replay=False)
        verdict = Verdict(a=run, b=run, control=None, updates=4, topology={}, rows=(PASSES, *rows))
        return verdict.first.quantity

    # An engine that got other pixels answers otherwise, in every sample of the group.
    assert first(row("response tokens", token=0), row("multimodal tensors", sample=3)) == "multimodal tensors"
    # One with a stale weight has other log-probs from the first token on, and draws another token only later.
    assert first(row("response tokens", token=3), row("rollout log-probs", token=0)) == "rollout log-probs"
    assert first(row("raw rewards"), row("rollout log-probs", token=5)) == "rollout log-probs"
    assert first(row("raw rewards", sample=2), row("rollout log-probs", sample=4, token=0)) == "raw rewards"
    assert first(row("multimodal tensors", update=2), row("parameters", phase="parameters")) == "parameters"


def test_a_report_counts_partitions_where_each_takes_several_updates():
    found = make_report([PASSES])
    assert "Live: B and each other run, 4 partitions" in report.text(found)
    assert "A partition takes" not in report.markdown(found)
    config = Config.model_validate({"actor": {"minis_per_partition": 2}})
    several = make_plan(replace(found.question, updates=8), config)
    text = report.markdown(replace(found, plan=several, question=replace(found.question, updates=8)))
    assert "A partition takes 2 updates. " in text and "2 recorded partitions" in text


def test_the_words_of_a_cell():
    assert [cell_text(row) for row in (PASSES, FAILS, UNDECIDABLE, ABSENT)] == [
        "exact",
        "DIFFERS 0.25",
        "undecidable 0.25",
        "absent",
    ]
    tokens = Distance(compared=40, differing=7)
    assert cell_text(Row(quantity="q", phase="inputs", required="exact", status="differs", distance=tokens)) == (
        "DIFFERS 7 of 40"
    )


def test_a_wide_table_goes_on_below():
    grid = Grid(["quantity", *"abcdefgh"], [["x" * 20, *["undecidable 1.2e-07"] * 8]])
    blocks = grid.text().split("\n\n")
    assert len(blocks) == 2 and all(len(line) <= 120 for line in grid.text().splitlines())
    assert all(block.startswith("quantity") for block in blocks)
    assert sum(block.count("undecidable") for block in blocks) == 8
