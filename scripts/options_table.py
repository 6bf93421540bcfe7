"""Writes the table of options in docs/configuration.md from stretto/config.py; `make fmt` runs it."""

from pathlib import Path

from stretto.checks import shown
from stretto.settings import BLOCKS, OPTIONS

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- options: begin, made by scripts/options_table.py -->\n", "<!-- options: end -->\n"


def tables() -> str:
    """One Markdown table for each block, in the order of the code."""
    parts = []
    for block in BLOCKS:
        rows = [option for name, option in OPTIONS.items() if name.startswith(f"{block}.")]
        parts.append(f"\n### [{block}]\n\n| key | accepts | default | what it is |\n|---|---|---|---|\n")
        for option in rows:
            cells = (f"`{option.name.split('.')[1]}`", option.form, f"`{shown(option.default)}`", option.description)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts) + "\n"


def rendered(document: str) -> str:
    """The document with its tables up to date."""
    head, rest = document.split(BEGIN)
    return head + BEGIN + tables() + END + rest.split(END)[1]


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
