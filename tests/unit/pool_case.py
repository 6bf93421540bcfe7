"""Process functions that a worker of the processor pool can import, and prompts for them; shared by tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.data.pool import ProcessorPool
from stretto.observe.trace import Tracer
from stretto.types import ProcessedPrompt, Prompt, StrettoError

QUIET = Tracer(None, "test")


def prompt(row: int, do: str = "", images: Sequence[Any] = ()) -> Prompt:
    """``do``: what ``act`` shall do with it."""
    return Prompt(row_id=f"tests/{row}", messages=(), images=images, answer=do)


def picture(seed: int, height: int = 32, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def act(prompt: Prompt) -> ProcessedPrompt:
    """The row's number as its ids, its images as float32 rows of 48; or whatever its answer says, ``verb argument``."""
    verb, _, argument = prompt.answer.partition(" ")
    if verb == "sleep":
        time.sleep(float(argument))
    elif verb == "hang" or (verb == "hang-once" and not Path(argument).exists()):
        Path(f"{argument}.new").write_text(str(os.getpid()))
        os.rename(f"{argument}.new", argument)
        time.sleep(600)
    elif verb == "die-once" and not Path(argument).exists():
        Path(argument).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "leave":
        os._exit(7)
    elif verb == "exit":
        sys.exit("enough")
    elif verb == "raise":
        raise ValueError(argument)
    elif verb == "complain":
        raise StrettoError(argument)
    elif verb == "lambda":
        return lambda: None  # type: ignore[return-value]
    elif verb == "broken":
        return Broken()  # type: ignore[return-value]
    elif verb == "frameworks":
        raise ValueError(sys.modules.keys() & {"torch", "transformers", "ray", "pydantic", "sklearn", "pytest"})
    elif verb == "write":
        with open(argument, "a") as file:
            file.write(f"{prompt.row_id}\n")
    pixels = [np.asarray(image, np.float32).reshape(-1, 48) / 255 for image in prompt.images]
    return ProcessedPrompt(
        prompt_ids=np.array([int(prompt.row_id.split("/")[1])], np.int32),
        mm_token_type_ids=np.zeros(1, np.int8),
        pixel_values=np.concatenate(pixels) if pixels else np.zeros((0, 48), np.float32),
        image_grid_thw=np.array([[1, 1, len(p)] for p in pixels], np.int32).reshape(-1, 3),
    )


class Broken:
    """Can be pickled, but not read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return broken, ()


def broken() -> None:
    raise ValueError("it was pickled wrongly")


class Seen(Sequence[np.ndarray]):
    """Images that remember which threads have pickled them."""

    threads: set[str] = set()  # noqa: RUF012

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        Seen.threads.add(threading.current_thread().name)
        return [picture(0)][index]

    def __reduce__(self) -> tuple[Any, ...]:
        Seen.threads.add(threading.current_thread().name)
        return Seen, ()


def arrays(result: ProcessedPrompt) -> list[np.ndarray]:
    return [result.prompt_ids, result.mm_token_type_ids, result.pixel_values, result.image_grid_thw]


def assert_equal(one: ProcessedPrompt, other: ProcessedPrompt) -> None:
    """Bit for bit, with dtypes and shapes."""
    for a, b in zip(arrays(one), arrays(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def with_pool(body: Callable[[ProcessorPool], Any], size: int = 1, function: Any = act, tracer: Tracer = QUIET) -> Any:
    """What ``await body(pool)`` returns, in an event loop of its own; the pool is closed after it."""

    async def main() -> Any:
        pool = ProcessorPool(function, size, tracer)
        await pool.start()
        try:
            return await body(pool)
        finally:
            pool.close()

    return asyncio.run(main())


async def outcomes(pool: ProcessorPool, prompts: Sequence[Prompt]) -> list[Any]:
    """Results and errors, in the order of ``prompts``."""
    return await asyncio.gather(*(pool.process(p) for p in prompts), return_exceptions=True)


def numbers(results: Sequence[Any]) -> list[int | str]:
    """The row number that each result holds, or the text of its error."""
    return [int(r.prompt_ids[0]) if isinstance(r, ProcessedPrompt) else str(r) for r in results]


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def memory_files() -> int:
    """Descriptors and mappings of this process's own files in memory."""
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    mapped = Path("/proc/self/maps").read_text().count("memfd:stretto-processor")
    return sum("memfd:stretto-processor" in name for name in descriptors) + mapped
