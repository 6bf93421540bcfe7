"""The inline processor runner: off the event loop, in order, one failure costs one request (case S7)."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stretto.data.processor import InlineProcessor
from stretto.observe.trace import Tracer, read_events
from stretto.types import ProcessedPrompt, Prompt, StrettoError

QUIET = Tracer(None, "test")


def prompt(row: int, images: tuple[np.ndarray, ...] = ()) -> Prompt:
    return Prompt(row_id=f"tests/{row}", messages=(), images=images)


def result(ids: list[int], pixel_values: np.ndarray | None = None) -> ProcessedPrompt:
    return ProcessedPrompt(
        prompt_ids=np.array(ids, np.int32),
        mm_token_type_ids=np.zeros(len(ids), np.int8),
        pixel_values=np.zeros((0, 1536), np.float32) if pixel_values is None else pixel_values,
        image_grid_thw=np.zeros((0, 3), np.int32),
    )


def shrink(prompt: Prompt) -> ProcessedPrompt:
    """What an image processor does: resize, normalise, cut into patches."""
    patches = []
    for image in prompt.images:
        small = np.asarray(Image.fromarray(image).resize((384, 544), Image.Resampling.BICUBIC))
        values = (small.astype(np.float32) / 255 - 0.5) / 0.5
        cut = values.reshape(34, 16, 24, 16, 3).transpose(0, 2, 4, 1, 3).reshape(34 * 24, 768)
        patches.append(np.concatenate([cut, cut], axis=1))
    return result([len(patches)], np.concatenate(patches))


def test_big_images_do_not_stop_the_event_loop() -> None:
    rng = np.random.default_rng(0)
    images = tuple(rng.integers(0, 256, (2170, 1536, 3), dtype=np.uint8) for _ in range(4))
    expected = shrink(prompt(0, images))

    async def main() -> float:
        processor = InlineProcessor(shrink, QUIET)
        gaps, running = [], True

        async def heartbeat() -> None:
            last = time.monotonic()
            while running:
                await asyncio.sleep(0.01)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        beat = asyncio.create_task(heartbeat())
        done = [processor.process(prompt(i, images)) for i in range(32)]
        for request in asyncio.as_completed(done):
            assert ((await request).pixel_values == expected.pixel_values).all()
        running = False
        await beat
        processor.close()
        return max(gaps)

    assert asyncio.run(main()) < 0.5


def test_requests_are_begun_in_order_on_one_thread_of_their_own() -> None:
    begun, threads = [], set()

    def process(prompt: Prompt) -> ProcessedPrompt:
        begun.append(prompt.row_id)
        threads.add(threading.current_thread().name)
        time.sleep(0.001 if len(begun) % 2 else 0.003)
        return result([int(prompt.row_id.split("/")[1])])

    async def main() -> list[int]:
        processor = InlineProcessor(process, QUIET)
        done = await asyncio.gather(*(processor.process(prompt(i)) for i in range(20)))
        processor.close()
        return [int(p.prompt_ids[0]) for p in done]

    assert asyncio.run(main()) == list(range(20))
    assert begun == [f"tests/{i}" for i in range(20)]
    assert threads == {"processor_0"}


def test_a_failure_names_its_row_and_leaves_the_others_alone() -> None:
    def process(prompt: Prompt) -> ProcessedPrompt:
        if prompt.row_id == "tests/3":
            raise ValueError("height:1 must be larger than factor:32")
        if prompt.row_id == "tests/5":
            raise StrettoError("row tests/5: one image too many")
        if prompt.row_id == "tests/6":
            raise StrettoError("one image too many")
        return result([1])

    async def main() -> list[ProcessedPrompt | BaseException]:
        processor = InlineProcessor(process, QUIET)
        done = await asyncio.gather(*(processor.process(prompt(i)) for i in range(8)), return_exceptions=True)
        processor.close()
        return done

    done = asyncio.run(main())
    failed = {i: str(error) for i, error in enumerate(done) if isinstance(error, StrettoError)}
    assert failed == {
        3: "row tests/3: processing failed: ValueError: height:1 must be larger than factor:32",
        5: "row tests/5: one image too many",
        6: "row tests/6: processing failed: StrettoError: one image too many",
    }
    assert sum(isinstance(p, ProcessedPrompt) for p in done) == 5


def test_every_request_leaves_a_span_with_its_row_and_its_wait(tmp_path: Path) -> None:
    def process(prompt: Prompt) -> ProcessedPrompt:
        time.sleep(0.05)
        return result([1])

    async def main() -> None:
        tracer = Tracer(tmp_path / "events.jsonl", "test")
        processor = InlineProcessor(process, tracer)
        await asyncio.gather(*(processor.process(prompt(i)) for i in range(3)))
        processor.close()
        tracer.flush()

    asyncio.run(main())
    spans = [e for e in read_events(tmp_path / "events.jsonl") if e["type"] == "span"]
    assert [(s["name"], s["row_id"], s["images"]) for s in spans] == [
        ("processor.process", f"tests/{i}", 0) for i in range(3)
    ]
    assert all(s["thread"] == "processor_0" for s in spans)
    assert spans[0]["wait_s"] < spans[1]["wait_s"] < spans[2]["wait_s"]
    assert spans[2]["wait_s"] >= 0.1


def test_close_lets_the_current_request_end_and_fails_the_rest() -> None:
    entered = threading.Event()

    def process(prompt: Prompt) -> ProcessedPrompt:
        entered.set()
        time.sleep(0.1)
        return result([1])

    async def main() -> None:
        processor = InlineProcessor(process, QUIET)
        tasks = [asyncio.create_task(processor.process(prompt(i))) for i in range(3)]
        while not entered.is_set():
            await asyncio.sleep(0.005)
        processor.close()
        processor.close()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[0], ProcessedPrompt)
        assert [str(e) for e in done[1:]] == [
            f"row tests/{i}: the processor was closed before its turn came" for i in (1, 2)
        ]
        with pytest.raises(StrettoError, match="row tests/9: asked of a processor that is closed"):
            await processor.process(prompt(9))

    asyncio.run(main())
    assert not any(t.name.startswith("processor") for t in threading.enumerate())


def test_a_cancelled_request_is_a_cancellation_and_never_begins() -> None:
    begun = []

    def process(prompt: Prompt) -> ProcessedPrompt:
        begun.append(prompt.row_id)
        time.sleep(0.1)
        return result([1])

    async def main() -> None:
        processor = InlineProcessor(process, QUIET)
        first, second = (asyncio.create_task(processor.process(prompt(i))) for i in range(2))
        await asyncio.sleep(0.02)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await first
        processor.close()

    asyncio.run(main())
    assert begun == ["tests/0"]
