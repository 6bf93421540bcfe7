"""Writes the digits data set as files, to try training on files with: python recipes/make_digit_files.py DIR

DIR gets images/*.png and train.jsonl, validation.jsonl and test.jsonl, one row an image: recipes/files.toml reads them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image

from stretto.config import DataConfig
from stretto.data.digits import Digits
from stretto.types import Split

ROWS: dict[Split, int] = {"train": 2048, "validation": 200, "test": 400}


def write(folder: Path, split: Split, rows: int, scale: int = 1) -> None:
    """``rows`` rows of a split to ``folder``/<split>.jsonl, and an image for each, ``scale`` times as wide and high."""
    source = Digits(DataConfig(digits=2), split)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
        for row in range(rows):
            prompt = source[row]
            name = f"images/{split}-{row:05}.png"
            image = Image.fromarray(prompt.images[0])
            if scale > 1:
                image = image.resize((image.width * scale, image.height * scale), Image.Resampling.BICUBIC)
            image.save(folder / name)
            line = {"id": f"{split}-{row:05}", "prompt": "<image>Sum?", "images": [name], "answer": prompt.answer}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the digits data set as images and JSONL files.")
    parser.add_argument("folder", type=Path, help="where to write; made if need be")
    for name, count in ROWS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="ROWS", help=f"rows of {name} ({count})")
    parser.add_argument("--scale", type=int, default=1, help="enlarge images, so that processing them costs more (1)")
    options = parser.parse_args()
    for name in ROWS:
        write(options.folder, name, getattr(options, name), options.scale)
    print(f"wrote {', '.join(f'{name}.jsonl' for name in ROWS)} and their images to {options.folder}")
