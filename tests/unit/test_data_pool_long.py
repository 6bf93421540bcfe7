"""The processor pool where it takes minutes: real processing in eight workers, again and again; inside a Ray actor."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
from pool_case import QUIET, assert_equal, numbers, outcomes, picture, prompt, with_pool
from processes import still_there

from stretto.data import pool_worker
from stretto.data.processor import InlineProcessor
from stretto.types import Prompt

pytestmark = pytest.mark.long
HERE = [str(Path(__file__).parent), str(Path(pool_worker.__file__).parents[2])]
LIMIT_S = 60.0

REPEATS = """
import asyncio, logging, os, sys, threading, time
os.environ["TOKENIZERS_PARALLELISM"] = "true"
sys.path[:0] = {path!r}
import tiny
from pool_case import QUIET, act, arrays, outcomes, picture, prompt
from stretto.data.pool import ProcessorPool

# No main guard: workers must not run the script of their parent again.
print("script runs", flush=True)
logging.basicConfig(filename={log!r}, level=logging.INFO)
def log_for_ever():
    while True:
        logging.info("a record")
        time.sleep(0.0002)
threading.Thread(target=log_for_ever, daemon=True).start()

family = tiny.family()
if {real}:
    process, prompts = family.process, [tiny.prompt(i, ((32 * (1 + i % 5), 64),)) for i in range(200)]
else:
    process, prompts = act, [prompt(i, "", [picture(i, 32 * (1 + i % 5))]) for i in range(200)]
wanted = [[a.tobytes() for a in arrays(process(p))] for p in prompts]

async def main():
    for repeat, size in enumerate({sizes!r}):
        family.tokenizer(["one two three " * 50] * 500)  # in threads of its own
        begun = time.monotonic()
        pool = ProcessorPool(process, size, QUIET)
        async with asyncio.timeout({limit}):
            await pool.start()
            results = await outcomes(pool, prompts)
        pool.close()
        assert [[a.tobytes() for a in arrays(r)] for r in results] == wanted
        print(repeat, size, len(pool.facts()["workers"]), round(time.monotonic() - begun, 1), flush=True)
asyncio.run(main())
"""


@pytest.mark.case("F1")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("real", "sizes"),
    [(True, [8] * 20), (False, [8] * 20), (True, [1, 2] * 3)],
    ids=["20 times 8", "20 times 8 that load little", "1 and 2"],
)
def test_no_start_hangs_beside_threads_and_tokenizers(real: bool, sizes: list[int], tmp_path: Path) -> None:
    text = REPEATS.format(path=HERE, log=str(tmp_path / "log"), real=real, sizes=sizes, limit=LIMIT_S)
    (tmp_path / "run.py").write_text(text)
    done = subprocess.run([sys.executable, tmp_path / "run.py"], capture_output=True, text=True, timeout=1400)
    print(done.stdout)
    first, *repeats = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert first == "script runs"
    assert [list(map(int, line.split()[:3])) for line in repeats] == [[i, s, s] for i, s in enumerate(sizes)]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_prompts_of_a_model_are_the_same_bits_for_every_size(size: int) -> None:
    shapes: list[tuple[tuple[int, int], ...]] = [(), ((32, 64),), ((64, 64), (32, 96), (96, 32)), ((512, 256),)]
    prompts = [tiny.prompt(i, shapes[i % 4], text=f"Question {i}?") for i in range(40)]

    async def inline() -> list[Any]:
        processor = InlineProcessor(tiny.family().process, QUIET)
        results = await outcomes(processor, prompts)  # type: ignore[arg-type]
        processor.close()
        return results

    expected = asyncio.run(inline())
    for result, wanted in zip(
        with_pool(lambda pool: outcomes(pool, prompts), size, tiny.family().process), expected, strict=True
    ):
        assert_equal(result, wanted)


@pytest.mark.case("S7")
def test_big_images_give_the_same_result_for_every_request() -> None:
    images = [picture(i, 2170, 1536) for i in range(4)]
    content = [part for _ in images for part in ({"type": "image"}, {"type": "text", "text": ","})]
    given = Prompt(row_id="tests/big", messages=({"role": "user", "content": content},), images=tuple(images))
    expected = tiny.family().process(given)
    results = with_pool(lambda pool: outcomes(pool, [given] * 32), 2, tiny.family().process)
    for result in results:
        assert_equal(result, expected)


IN_RAY = """
import asyncio, sys
sys.path[:0] = {path!r}
import ray
from stretto.compat import ray_on_loopback
with ray_on_loopback():
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=2**28,
             log_to_driver=False, configure_logging=False)

class Rollout:
    async def start(self):
        import os
        from stretto import machine
        from stretto.data.pool import ProcessorPool
        from stretto.observe.trace import Tracer
        import tiny
        machine.adopt_orphans()
        self.cores = machine.settle(tuple(sorted(os.sched_getaffinity(0)))[:1], "exact")["cores"]
        self.pool = ProcessorPool(tiny.family().process, 2, Tracer(None, "test"))
        await self.pool.start()
        return list(self.pool.facts()["workers"]), self.cores
    async def work(self, first, last):
        import pool_case, tiny
        wanted = [tiny.prompt(i, ((64, 64),) * (i % 3)) for i in range(first, last)]
        for given, result in zip(wanted, await pool_case.outcomes(self.pool, wanted)):
            pool_case.assert_equal(result, tiny.family().process(given))
        return self.pool.facts()
    async def close(self):
        self.pool.close()

rollout = ray.remote(num_cpus=1)(Rollout).options(max_concurrency=100).remote()
pids, cores = ray.get(rollout.start.remote())
print(*pids, flush=True)
print(*cores, flush=True)
works = [rollout.work.remote(10 * i, 10 * i + 10) for i in range(4)]
print(max(sum(facts["workers"].values()) for facts in ray.get(works)), flush=True)  # of whichever ended last
input()  # while this waits, a worker is killed
facts = ray.get(rollout.work.remote(0, 20))
print(facts["replaced"], *facts["workers"], flush=True)
input()
{end}
print("ended", flush=True)
input()
"""


@pytest.mark.parametrize("end", ["ray.get(rollout.close.remote())", "ray.kill(rollout)", "ray.shutdown()"])
@pytest.mark.timeout(300)
def test_a_pool_lives_in_a_ray_actor_and_ends_with_it(end: str, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(IN_RAY.format(path=HERE, end=end))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(HERE)}
    with subprocess.Popen(
        [sys.executable, tmp_path / "run.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        try:
            first = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
            cores = [int(core) for core in driver.stdout.readline().split()]
            assert len(first) == 2 and [p.cpu_affinity() for p in first] == [cores, cores]
            assert driver.stdout.readline() == "40\n"
            first[0].kill()
            print(file=driver.stdin, flush=True)
            replaced, *pids = map(int, driver.stdout.readline().split())
            assert replaced == 1 and len(pids) == 3
            print(file=driver.stdin, flush=True)
            assert driver.stdout.readline() == "ended\n"
            assert not still_there(pids, 10)
        finally:
            driver.kill()


@pytest.mark.case("F2")
def test_many_deaths_cost_no_other_job(tmp_path: Path) -> None:
    """Every fifth of a hundred jobs kills its worker the first time, every tenth each time."""
    prompts = [prompt(i, "sleep 0.01", [picture(i, 256, 256)]) for i in range(100)]
    for i in range(0, 100, 5):
        prompts[i] = prompt(i, "die" if i % 10 == 0 else f"die-once {tmp_path / str(i)}", [picture(i, 256, 256)])

    async def body(pool: Any) -> None:
        found = numbers(await outcomes(pool, prompts))
        assert [n for i, n in enumerate(found) if i % 10] == [i for i in range(100) if i % 10]
        for i in range(0, 100, 10):
            assert str(found[i]).startswith(f"row tests/{i}: processing it ended its worker process 2 times")
        assert pool.facts()["replaced"] in (29, 30)  # the last one may not have been replaced yet

    with_pool(body, 2)
