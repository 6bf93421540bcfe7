"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(help="Recipe (TOML); see recipes/ and docs/configuration.md.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="BLOCK.KEY=VALUE", help="Change one option; may be repeated."),
]
