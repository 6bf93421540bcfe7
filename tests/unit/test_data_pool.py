"""The processor pool: the results of the inline processor from other processes, whatever becomes of these."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import data_case
import numpy as np
import pool_case
import psutil
import pytest
import tiny
from pool_case import (
    QUIET,
    act,
    assert_equal,
    memory_files,
    numbers,
    outcomes,
    picture,
    prompt,
    wait_for,
    with_pool,
)
from processes import still_there, that_run

from stretto.data import pool_worker
from stretto.data.images import Images
from stretto.data.pool import ProcessorPool
from stretto.data.processor import InlineProcessor
from stretto.observe.trace import Tracer, read_events
from stretto.types import ProcessedPrompt, Prompt, StrettoError

MIXED = [tiny.prompt(i, [(), ((32, 64),), ((64, 64), (32, 96), (96, 32)), ((512, 256),)][i % 4]) for i in range(12)]
SCRIPT = """
import asyncio, logging, os, signal, sys, threading
sys.path[:0] = {path!r}
from pool_case import QUIET, act, numbers, outcomes, picture, prompt
from stretto.data.pool import ProcessorPool

# No main guard: workers must not run the script of their parent again (case F1).
print("script runs", flush=True)
pool = ProcessorPool(act, 2, QUIET)
async def main():
    await pool.start()
    {body}
asyncio.run(main())
"""


def pool_workers() -> list[psutil.Process]:
    """Those of this process; it may have children of other tests."""
    return that_run("pool_worker", psutil.Process().children())


def script(body: str) -> str:
    path = [str(Path(__file__).parent), str(Path(pool_worker.__file__).parents[2])]
    return textwrap.dedent(SCRIPT).format(path=path, body=body)


def workers(pool: ProcessorPool) -> list[psutil.Process]:
    """The worker processes of ``pool`` that are there."""
    pids = [int(pid) for pid in pool.facts()["workers"]]
    return still_there(pids, 0)


# Same results ----------------------------------------------------------------------------------------------------


def test_prompts_of_a_model_are_the_same_bits_in_the_same_order() -> None:
    async def inline() -> list[ProcessedPrompt]:
        processor = InlineProcessor(tiny.family().process, QUIET)
        results = await outcomes(processor, MIXED)  # type: ignore[arg-type]
        processor.close()
        return results

    expected = asyncio.run(inline())
    results = with_pool(lambda pool: outcomes(pool, MIXED), 2, tiny.family().process)
    for result, wanted in zip(results, expected, strict=True):
        assert_equal(result, wanted)
    assert {len(r.image_grid_thw) for r in results} == {0, 1, 3}


@pytest.mark.parametrize("size", [1, 2, 8])
def test_every_size_gives_each_request_its_own_result(size: int) -> None:
    prompts = [
        prompt(i, "sleep 0.01" if i % 7 == 0 else "", [picture(i, 256, 16 * (1 + i % 40))] * (i % 3)) for i in range(60)
    ]
    results = with_pool(lambda pool: outcomes(pool, prompts), size)
    for given, result in zip(prompts, results, strict=True):
        assert_equal(result, act(given))


def test_requests_begin_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    log = tmp_path / "begun"
    with_pool(lambda pool: outcomes(pool, [prompt(i, f"write {log}") for i in range(30)]))
    assert log.read_text().split() == [f"tests/{i}" for i in range(30)]


def test_arrays_keep_their_type_shape_layout_and_values_at_any_size() -> None:
    rng = np.random.default_rng(0)
    given = [
        *(rng.integers(0, 256, n, np.uint8) for n in (0, 1, 63, 64, 65, 65536, 200_001)),
        rng.standard_normal((300, 400)).astype(np.float32),
        np.asfortranarray(rng.standard_normal((200, 200))),
        rng.standard_normal((300, 400))[::2, ::3],
        np.zeros((0, 1536), np.float32),
        np.float32(3),
    ]
    with channels() as (ours, theirs):
        for _ in range(2):
            sent = ours.send(pool_worker.pack(given))
            found = pool_worker.unpack(theirs.receive())
            assert sent > sum(a.nbytes for a in given)
            for a, b in zip(found, given, strict=True):
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
            assert found[8].flags.f_contiguous and found[7].flags.writeable and found[7].flags.aligned


def test_a_message_is_not_changed_by_the_next_one_and_a_large_one_is_not_kept() -> None:
    large, small = np.ones(pool_worker.KEPT_BYTES + 10, np.uint8), np.full(1000, 2, np.uint8)
    with channels() as (ours, theirs):
        found = []
        for given in (small, large, small + 1, large + 3, small + 4):
            ours.send(pool_worker.pack(given))
            found.append(pool_worker.unpack(theirs.receive()))
            held = os.fstat(ours.outbox.file).st_size
            assert held > len(large) if given.nbytes > 1000 else held <= pool_worker.KEPT_BYTES
        assert [(len(a), a.min(), a.max()) for a in found] == [
            (len(small), 2, 2),
            (len(large), 1, 1),
            (len(small), 3, 3),
            (len(large), 4, 4),
            (len(small), 6, 6),
        ]
    assert memory_files() == 0


@contextmanager
def channels() -> Iterator[tuple[pool_worker.Channel, pool_worker.Channel]]:
    """Both sides of a connection, in this process."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    files = [os.memfd_create(pool_worker.FILE_NAME) for _ in range(2)]
    sides = pool_worker.Channel(one, *files), pool_worker.Channel(other, *(os.dup(f) for f in reversed(files)))
    yield sides
    for side in sides:
        side.close()


def test_images_of_files_are_decoded_in_the_worker(tmp_path: Path) -> None:
    pixels = data_case.picture(tmp_path / "large.png", size=(1024, 1024))
    given = prompt(1, "", Images(["large.png", data_case.encoded(pixels)], "tests/1", tmp_path))
    missing = prompt(2, "", Images(["gone.png"], "tests/2", tmp_path))

    async def body(pool: ProcessorPool) -> None:
        before = pool.facts()["bytes_to_workers"]
        large = await pool.process(given)
        assert_equal(large, act(prompt(1, "", [pixels, pixels])))
        sent = pool.facts()["bytes_to_workers"] - before
        assert sent < len(data_case.encoded(pixels)) + 2000  # the name of the one, the encoded bytes of the other
        with pytest.raises(StrettoError, match=r"^row tests/2, image 0: cannot be read as an image: .*gone\.png"):
            await pool.process(missing)

    with_pool(body)


# Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.case("F2")
@pytest.mark.parametrize("again", [False, True], ids=["first try only", "always"])
def test_a_job_that_kills_its_worker_is_tried_twice_and_costs_no_other_job(again: bool, tmp_path: Path) -> None:
    prompts = [prompt(i, "sleep 0.02") for i in range(10)]
    prompts[5] = prompt(5, "die" if again else f"die-once {tmp_path / 'died'}")
    prompts[7] = prompt(7, "lambda")

    async def body(pool: ProcessorPool) -> None:
        found = numbers(await outcomes(pool, prompts))
        assert [n for i, n in enumerate(found) if i not in (5, 7)] == [0, 1, 2, 3, 4, 6, 8, 9]
        assert str(found[7]).startswith("row tests/7: its result cannot be sent back from the worker: ")
        died_twice = "row tests/5: processing it ended its worker process 2 times (SIGKILL, then SIGKILL; mostly"
        assert str(found[5]).startswith(died_twice) if again else found[5] == 5
        assert await outcomes(pool, prompts[:2]) != []
        facts = pool.facts()
        assert facts["size"] == 2 and facts["replaced"] == (2 if again else 1)
        assert sum(facts["workers"].values()) == (11 if again else 12)

    with_pool(body, 2)


@pytest.mark.case("F2")
def test_a_worker_that_is_killed_while_it_works_is_replaced(tmp_path: Path) -> None:
    prompts = [prompt(i) for i in range(8)]
    prompts[2] = prompt(2, f"hang-once {tmp_path / 'pid'}")

    async def body(pool: ProcessorPool) -> None:
        running = asyncio.ensure_future(outcomes(pool, prompts))
        await asyncio.to_thread(wait_for, (tmp_path / "pid").exists)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert numbers(await running) == list(range(8))
        assert len(workers(pool)) == 2

    with_pool(body, 2)


def test_a_worker_that_is_killed_while_idle_is_replaced_and_no_job_is_blamed() -> None:
    async def body(pool: ProcessorPool) -> None:
        for i in range(4):
            assert numbers(await outcomes(pool, [prompt(i)])) == [i]
            for worker in workers(pool):
                worker.kill()
            time.sleep(0.05)
        assert pool.facts()["replaced"] == 3

    with_pool(body)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("raise no such colour", "row tests/3: processing failed: ValueError: no such colour"),
        ("complain row tests/3: one image too many", "row tests/3: one image too many"),
        ("complain one image too many", "row tests/3: processing failed: StrettoError: one image too many"),
        ("leave", "row tests/3: processing it ended its worker process 2 times (exit code 7, then exit code 7)"),
        ("exit", "row tests/3: processing failed: SystemExit: enough"),
        ("frameworks", "row tests/3: processing failed: ValueError: set()"),  # a worker loads what its function needs
        ("broken", "row tests/3: its result cannot be read: ValueError: it was pickled wrongly"),
    ],
)
def test_a_failure_names_its_row_and_its_reason(do: str, says: str) -> None:
    async def body(pool: ProcessorPool) -> None:
        found = await outcomes(pool, [prompt(2), prompt(3, do), prompt(4)])
        assert numbers(found) == [2, says, 4]
        assert isinstance(found[1], StrettoError)
        if do.startswith("raise"):
            assert "pool_case.py" in found[1].__notes__[0]  # where it was raised
        assert pool.facts()["replaced"] == (2 if do == "leave" else 0)

    with_pool(body)


def test_what_cannot_be_pickled_on_the_way_there_names_its_row() -> None:
    async def body(pool: ProcessorPool) -> None:
        found = await outcomes(
            pool, [prompt(1, "", [threading.Lock()]), prompt(2, "", [pool_case.Broken()]), prompt(3)]
        )
        assert numbers(found) == [
            "row tests/1: cannot be sent to a worker: TypeError: cannot pickle '_thread.lock' object",
            "row tests/2: a worker cannot read it: ValueError: it was pickled wrongly",
            3,
        ]
        assert pool.facts()["replaced"] == 0

    with_pool(body)


# Start -----------------------------------------------------------------------------------------------------------


def test_a_function_that_cannot_be_pickled_is_refused_before_any_process_starts() -> None:
    with pytest.raises(StrettoError, match=r"cannot hand .*<lambda> to its processes \(.*pickle"):
        with_pool(lambda pool: None, 2, lambda p: None)
    assert pool_workers() == []


@pytest.mark.parametrize(
    ("module", "says", "starts"),
    [
        ("raise RuntimeError('no licence')", r"cannot load its process function \(RuntimeError: no licence\)", 1),
        ("import os; os._exit(3)", r"ended 3 times while it started \(exit code 3, then exit code 3, then", 3),
    ],
)
def test_a_worker_that_cannot_start_is_an_error_and_is_not_tried_for_ever(
    module: str, says: str, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def process(prompt): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    (tmp_path / "only_here.py").write_text(f"with open({str(tmp_path / 'log')!r}, 'a') as f: f.write('x')\n{module}\n")
    with pytest.raises(StrettoError, match=says):
        with_pool(lambda pool: None, 1, only_here.process)
    assert (tmp_path / "log").read_text() == "x" * starts
    assert pool_workers() == []
    del sys.modules["only_here"]


def test_where_no_worker_can_be_replaced_every_request_fails_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "goes_bad.py").write_text("from pool_case import act\ndef process(prompt): return act(prompt)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import goes_bad  # type: ignore[import-not-found]

    async def body(pool: ProcessorPool) -> None:
        (tmp_path / "goes_bad.py").write_text("import os; os._exit(3)")
        os.utime(tmp_path / "goes_bad.py", (1, 1))  # or the compiled file of the first would be taken
        found = numbers(await asyncio.wait_for(outcomes(pool, [prompt(1), prompt(2, "die"), *[prompt(3)] * 500]), 30))
        assert found[0] == 1
        assert str(found[1]).startswith("row tests/2: a processor worker ended 3 times while it started")
        assert str(found[2]).startswith("row tests/3: a processor worker ended 3 times while it started")
        assert len(set(found[2:])) == 1

    with_pool(body, 1, goes_bad.process)
    del sys.modules["goes_bad"]


# Order of things -------------------------------------------------------------------------------------------------


@pytest.mark.case("S7")
def test_the_event_loop_neither_pickles_nor_copies() -> None:
    pool_case.Seen.threads.clear()
    with_pool(lambda pool: outcomes(pool, [prompt(i, "", pool_case.Seen()) for i in range(4)]), 2)
    assert pool_case.Seen.threads and pool_case.Seen.threads <= {"processor 0", "processor 1"}


def test_every_request_leaves_a_span_with_its_wait_its_worker_and_its_bytes(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "events.jsonl", "test")
    prompts = [prompt(i, "sleep 0.05", [picture(0, 512, 512)]) for i in range(3)] + [prompt(3, "raise it")]

    async def body(pool: ProcessorPool) -> dict:
        await outcomes(pool, prompts)
        return pool.facts()

    facts = with_pool(body, tracer=tracer)
    tracer.flush()
    spans = [e for e in read_events(tmp_path / "events.jsonl") if e["type"] == "span"]
    assert [(s["name"], s["row_id"], s["images"]) for s in spans] == [
        ("processor.process", f"tests/{i}", int(i < 3)) for i in range(4)
    ]
    assert {str(s["worker"]) for s in spans} == facts["workers"].keys()
    assert list(facts["workers"].values()) == [4]
    assert spans[0]["wait_s"] < spans[1]["wait_s"] < spans[2]["wait_s"] and spans[2]["wait_s"] >= 0.1
    assert all(s["bytes"] > 512 * 512 * 3 * 5 for s in spans[:3])  # uint8 there, float32 back
    assert [s.get("error") for s in spans] == [None, None, None, "StrettoError"]


def test_close_lets_a_request_end_fails_the_rest_and_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        pool = ProcessorPool(act, 1, QUIET)
        with pytest.raises(StrettoError, match="row tests/9: asked of a processor that is not started"):
            await pool.process(prompt(9))
        await pool.start()
        log = tmp_path / "log"
        tasks = [asyncio.ensure_future(pool.process(prompt(i, "sleep 0.3" if i else f"write {log}"))) for i in range(4)]
        await tasks[0]
        await asyncio.sleep(0.1)
        pool.close()
        pool.close()
        found = numbers(await asyncio.gather(*tasks, return_exceptions=True))
        unbegun = [f"row tests/{i}: the processor was closed before its turn came" for i in (2, 3)]
        assert found == [0, 1, *unbegun]
        with pytest.raises(StrettoError, match="row tests/9: asked of a processor that is closed"):
            await pool.process(prompt(9))

    asyncio.run(main())
    assert pool_workers() == []
    assert not any(t.name.startswith("processor") for t in threading.enumerate())


def test_close_ends_a_request_that_does_not_end(tmp_path: Path) -> None:
    async def body(pool: ProcessorPool) -> None:
        hanging = asyncio.ensure_future(pool.process(prompt(1, f"hang {tmp_path / 'pid'}")))
        await asyncio.to_thread(wait_for, (tmp_path / "pid").exists)
        begun = time.monotonic()
        pool.close()
        assert time.monotonic() - begun < 10
        with pytest.raises(StrettoError, match="row tests/1: the processor was closed while it was processed"):
            await hanging
        assert pool_workers() == []

    with_pool(body)


def test_close_while_it_starts_ends_the_start() -> None:
    async def main() -> None:
        pool = ProcessorPool(tiny.family().process, 2, QUIET)
        starting = asyncio.ensure_future(pool.start())
        await asyncio.to_thread(wait_for, lambda: len(pool.facts()["workers"]) == 2)
        pool.close()
        with pytest.raises(StrettoError, match="the processor was closed while it started"):
            await starting

    asyncio.run(main())
    assert pool_workers() == []


def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def main() -> None:
        pool = ProcessorPool(tiny.family().process, 2, QUIET)
        starting = asyncio.ensure_future(pool.start())
        await asyncio.to_thread(wait_for, lambda: len(pool.facts()["workers"]) == 2)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    assert pool_workers() == []


def test_a_cancelled_request_that_has_not_begun_never_begins(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def body(pool: ProcessorPool) -> None:
        tasks = [asyncio.ensure_future(pool.process(p)) for p in (prompt(0, "sleep 0.2"), prompt(1, f"write {log}"))]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        assert numbers(await outcomes(pool, [prompt(2, f"write {log}")])) == [2]

    with_pool(body)
    assert log.read_text() == "tests/2\n"


# What is left behind ---------------------------------------------------------------------------------------------


def test_descriptors_and_mappings_stay_as_many_as_they_were() -> None:
    def one(i: int) -> Prompt:
        return prompt(i, "", [picture(0, 256, 256)] * 2)

    async def body(pool: ProcessorPool) -> None:
        await pool.process(one(0))
        (worker,) = workers(pool)

        def counts() -> tuple[int, int, int, int]:
            theirs = Path(f"/proc/{worker.pid}/maps").read_text().count("memfd:")
            return len(os.listdir("/proc/self/fd")), memory_files(), worker.num_fds(), theirs

        before = counts()
        kept = [await pool.process(one(i)) for i in range(100)]
        assert counts() == before and len(kept) == 100
        worker.kill()
        await pool.process(one(0))
        (worker,) = workers(pool)
        assert counts() == before

    with_pool(body)
    assert memory_files() == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_and_no_shared_memory_outlives_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    jobs = f"[prompt(0, 'hang {tmp_path}/0', [picture(0, 512, 512)]), prompt(1, 'hang {tmp_path}/1')]"
    parent = subprocess.Popen(
        [sys.executable, "-c", script(f"await outcomes(pool, {jobs})")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        children = psutil.Process(parent.pid).children(recursive=True)
        assert {c.pid for c in children} == {int((tmp_path / n).read_text()) for n in "01"}
        parent.send_signal(how)
        output, _ = parent.communicate(timeout=10)
    finally:
        parent.kill()
    assert output == "script runs\n" and parent.returncode != 0
    assert psutil.wait_procs(children, timeout=5)[1] == []
    wait_for(lambda: not held_by_nobody(set(os.listdir("/dev/shm")) - before), 5)


def held_by_nobody(names: set[str]) -> set[str]:
    """Files of /dev/shm that are there, and that no process has open or mapped: others that run beside hold theirs."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            held |= {line.split()[5] for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line}
            held |= {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
    return {name for name in names if f"/dev/shm/{name}" not in held and Path("/dev/shm", name).exists()}


def test_a_parent_that_ends_without_closing_ends_its_workers() -> None:
    body = "await outcomes(pool, [prompt(0)]); print(*pool.facts()['workers'])"
    done = subprocess.run([sys.executable, "-c", script(body)], check=True, timeout=60, capture_output=True, text=True)
    pids = [int(pid) for pid in done.stdout.splitlines()[-1].split()]
    assert len(pids) == 2 and done.stderr == ""
    assert not still_there(pids, 5)


# Odd parents -----------------------------------------------------------------------------------------------------

RUN = "print(numbers(await outcomes(pool, [prompt(i, 'die-once ' + {0!r} if i == 3 else '') for i in range(6)])))"


@pytest.mark.parametrize(
    ("before", "command"),
    [
        ("", "{python} {script} > {out} < /dev/null"),
        ("", "{python} {script} > {out} <&- 2>&-"),
        ("sys.stdout = open({out!r}, 'w'); ", "{python} {script} <&- >&- 2>&-"),
        ("signal.signal(signal.SIGCHLD, signal.SIG_IGN); ", "{python} {script} > {out}"),
        ("from stretto import machine; machine.adopt_orphans(); ", "{python} {script} > {out}"),
    ],
    ids=["plain", "closed input and errors", "closed streams", "ignored children", "adopts orphans"],
)
def test_workers_start_and_are_replaced_under_an_odd_parent(before: str, command: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "run.py").write_text(
        script(before.format(out=str(out)) + RUN.format(str(tmp_path / "died")) + "; sys.stdout.flush()")
    )
    subprocess.run(
        command.format(python=sys.executable, script=tmp_path / "run.py", out=out), shell=True, check=True, timeout=60
    )
    assert out.read_text().splitlines()[-1] == "[0, 1, 2, 3, 4, 5]"


def test_a_function_of_the_script_itself_is_refused_with_a_remedy(tmp_path: Path) -> None:
    text = script("pass").replace("ProcessorPool(act, 2, QUIET)", "ProcessorPool(mine, 2, QUIET)")
    (tmp_path / "run.py").write_text("def mine(prompt): ...\n" + text)
    done = subprocess.run([sys.executable, tmp_path / "run.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "script runs\n"
    assert "cannot load its process function (AttributeError: Can't get attribute 'mine'" in done.stderr
    assert "not of the script that was started" in done.stderr


def test_workers_have_one_thread_and_the_cores_of_whoever_started_them() -> None:
    cores = sorted(os.sched_getaffinity(0))

    async def body(pool: ProcessorPool) -> None:
        await outcomes(pool, MIXED[:4])
        for worker in workers(pool):
            assert worker.cpu_affinity() == cores[:1] and worker.num_threads() == 1

    os.sched_setaffinity(0, cores[:1])
    try:
        with_pool(body, 2, tiny.family().process)
    finally:
        os.sched_setaffinity(0, cores)


def test_a_pool_has_at_least_one_process() -> None:
    with pytest.raises(ValueError, match="a pool of 0 processes"):
        ProcessorPool(act, 0, QUIET)
