"""A report as a few kinds of blocks, so that Markdown and HTML say the same; and its Markdown.

Text may hold `code` and **strong** words; all else of it is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paragraph:
    """``kind``: lead (what to read first), note (how to read something), warning, or empty."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Bullets:
    """``kind`` as of a paragraph."""

    items: Sequence[str]
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """``rows`` of as many cells as ``head``; the first cell names its row.

    words  columns of words, besides the first; the others hold numbers
    cards  on a narrow screen each row becomes a card: for few rows with long cells
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()
    cards: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """``svg`` is one drawing of ``stretto.bench.plots``; ``name`` that of its file beside report.md."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Gallery:
    """Figures that stand beside one another where there is room."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Legend:
    """Colours by class, each with what it stands for. ``toggles``: the page can hide each."""

    entries: Sequence[tuple[str, str]]
    toggles: bool = False


PROSE = "text"


@dataclass(frozen=True)
class Code:
    """What is copied as it stands. Lines of ``PROSE`` may be broken; those of a program, or of commands, are not."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class Details:
    """What only some readers need: folded on the page, open in print and in Markdown."""

    summary: str
    blocks: Sequence[Block]


Block = Paragraph | Bullets | Table | Figure | Gallery | Legend | Code | Details


@dataclass(frozen=True)
class Section:
    """``anchor`` is unique within a document."""

    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    sections: Sequence[Section]


def figures(blocks: Iterable[Block]) -> list[Figure]:
    """All that a document's blocks hold, in order."""
    found: list[Figure] = []
    for block in blocks:
        if isinstance(block, Figure):
            found.append(block)
        elif isinstance(block, Gallery):
            found += block.figures
        elif isinstance(block, Details):
            found += figures(block.blocks)
    return found


def markdown(document: Document) -> str:
    parts = [f"# {document.title}", document.subtitle]
    for section in document.sections:
        parts.append(f"## {section.title}")
        parts += [text for block in section.blocks if (text := _markdown(block))]
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Paragraph(text=text, kind=kind):
            return f"**{text}**" if kind == "lead" else f"> {_plain(text)}" if kind == "warning" else _plain(text)
        case Bullets(items=items, kind=kind):
            return "\n".join(f"{'> ' if kind == 'warning' else ''}- {_plain(item)}" for item in items)
        case Table(caption=caption, head=head, rows=rows):
            lines = (head, ["---"] * len(head), *rows)
            table = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
            return f"{_plain(caption)}\n\n{table}" if caption else table
        case Figure(name=name, caption=caption):
            words = re.sub(r"[`*\[\]]", "", caption)
            return f"![{words}](figures/{name}.svg)"
        case Gallery(figures=each):
            return "\n\n".join(_markdown(figure) for figure in each)
        case Code(text=text, language=language):
            return f"```{language}\n{text}\n```"
        case Details(summary=summary, blocks=blocks):
            return "\n\n".join([f"### {summary}", *(_markdown(inner) for inner in blocks)])
        case Legend():  # each drawing names its own colours
            return ""


def _plain(text: str) -> str:
    return text.replace("<", "&lt;")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", "<br>")
