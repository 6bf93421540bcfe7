"""The digits job under TRL's GRPOTrainer, for ``benchmarks/trl.py``; runs in an environment that has trl, not stretto.

    python benchmarks/trl_side.py SETTINGS.json

SETTINGS names the model folder, the rows (made by stretto's own data set) and what a step holds. Writes one JSON line
a step, with its seconds, to the file that SETTINGS names.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration, Qwen3VLProcessor, TrainerCallback
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import GRPOConfig, GRPOTrainer


class NoVideo(Qwen3VLProcessor):
    """Without a video processor, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor" and argument is None:
            return type(None)
        return super().check_argument_for_proper_class(argument_name, argument)


class StepTimes(TrainerCallback):
    """Seconds from the end of one step to the end of the next, and the mean reward TRL logged for it."""

    def __init__(self, path: Path):
        self.file = path.open("w")
        self.before = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        print(json.dumps({"step": state.global_step, "step_s": now - self.before}), file=self.file, flush=True)
        self.before = now

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            print(json.dumps({"logged": state.global_step, "reward": logs["reward"]}), file=self.file, flush=True)


def exact(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.strip() == wanted) for text, wanted in zip(texts, answer, strict=True)]


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    tokenizer = AutoTokenizer.from_pretrained(given["model"], padding_side="left")
    images = Qwen2VLImageProcessorPil.from_pretrained(given["model"])
    processor = NoVideo(images, tokenizer, None, chat_template=tokenizer.chat_template)
    model = Qwen3VLForConditionalGeneration.from_pretrained(given["model"], dtype=torch.float32)
    rows = json.loads(Path(given["rows"]).read_text())
    data = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": row["question"]}] for row in rows],
            "image": [Image.open(row["image"]).convert("RGB") for row in rows],
            "answer": [row["answer"] for row in rows],
        }
    ).cast_column("image", ImageFeature())
    samples = given["prompts"] * given["n"]
    config = GRPOConfig(
        output_dir=given["output"],
        use_cpu=True,
        per_device_train_batch_size=given["microbatch"],
        gradient_accumulation_steps=samples // given["microbatch"],
        num_generations=given["n"],
        max_completion_length=given["max_tokens"],
        max_steps=given["steps"],
        learning_rate=given["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",  # a mean over tokens, as algorithm.aggregation = "token_mean" is
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=given["seed"],
        dataloader_num_workers=0,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=exact,
        args=config,
        train_dataset=data,
        callbacks=[StepTimes(Path(given["times"]))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
