"""A document as one page of HTML that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from stretto.bench import svg
from stretto.bench.arithmetic import Finding
from stretto.bench.document import (
    PROSE,
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Figure,
    Gallery,
    Legend,
    Paragraph,
    Section,
    Table,
)
from stretto.bench.markup import Markup, element, inline, joined
from stretto.bench.phrases import judged

STATES = {
    "supported": "good",
    "passed": "good",
    "accepted": "good",
    "reached": "good",
    "negative": "bad",
    "failed": "bad",
    "guardrail failed": "bad",
    "rejected": "bad",
    "missed": "bad",
    "inconclusive": "open",
    "open": "open",
    "excluded": "open",
    "not measured": "open",
}
STATES |= {judged(word, False): "bad" if word == "guardrail failed" else "open" for word in get_args(Finding)}
"""Words that a cell may consist of, and how they are marked; the word itself says it all without the colour. What
carries no claim is never green.
"""
LARGEST_TOGGLE = 10

CSS = (
    f":root{{{svg.LIGHT_VARIABLES};--good:#116329;--good-bg:#dafbe1;--bad:#a40e26;--bad-bg:#ffebe9;"
    "--open:#59636e;--open-bg:#eaeef2;--warn:#7d4e00;--warn-bg:#fff8c5;--link:#0969da;color-scheme:light dark}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{svg.DARK_VARIABLES};--good:#56d364;--good-bg:#12261e;"
    "--bad:#ff8182;--bad-bg:#2d1214;--open:#9aa4af;--open-bg:#21262d;--warn:#e3b341;--warn-bg:#272115;"
    "--link:#58a6ff}}"
    """
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,
'DejaVu Sans',sans-serif}
main,header{max-width:1120px;margin:0 auto;padding:0 20px}
header{padding-top:28px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .3em;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:2.2em 0 .6em;padding-bottom:.25em;border-bottom:1px solid var(--line)}
h2 a{color:inherit;text-decoration:none}
p{margin:.6em 0;max-width:80ch}
.subtitle,.note,figcaption,.caption{color:var(--muted)}
.note,figcaption,.caption{font-size:.9rem}
.lead{font-size:1.12rem;font-weight:600;padding:.7em 1em;border-left:5px solid var(--link);background:var(--shade);
border-radius:0 6px 6px 0;max-width:none}
.warning{padding:.5em 1em;border-left:5px solid var(--warn);background:var(--warn-bg);border-radius:0 6px 6px 0;
max-width:none}
ul.warning{padding-left:2.2em}
.warning li{max-width:none}
nav ul{display:flex;flex-wrap:wrap;gap:.2em 1.1em;list-style:none;padding:0;margin:.8em 0;font-size:.9rem}
a{color:var(--link)}
li{margin:.25em 0;max-width:90ch;overflow-wrap:anywhere}
code,pre{font:.86em/1.5 ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace}
code{overflow-wrap:anywhere}
pre{background:var(--shade);padding:.8em 1em;border-radius:6px;overflow-x:auto}
pre.prose{white-space:pre-wrap}
.scroll{overflow-x:auto;margin:.3em 0 1.4em}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
.caption{margin:1.2em 0 0}
th,td{padding:.38em .7em;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
thead th{border-bottom:2px solid var(--muted);vertical-align:bottom;font-weight:600}
th:first-child,td.words,th.words{text-align:left}
td.words{white-space:normal;min-width:13ch;overflow-wrap:anywhere}
tbody th{font-weight:600}
.state{display:inline-block;padding:.05em .6em;border-radius:1em;font-weight:600;white-space:nowrap}
.good{color:var(--good);background:var(--good-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}
.open{color:var(--open);background:var(--open-bg)}
figure{margin:1em 0;min-width:0}
.chart{display:block;width:100%;height:auto}
figure.single{max-width:720px}
.gallery{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:.5em 1.6em}
.legend{display:flex;flex-wrap:wrap;gap:.3em 1.2em;padding:0;margin:.6em 0;border:0;font-size:.92rem}
.legend label,.legend span{display:inline-flex;align-items:center;gap:.4em;cursor:pointer}
.legend i{width:.85em;height:.85em;border-radius:2px;background:var(--k)}
details{margin:.8em 0}
summary{cursor:pointer;color:var(--link)}
footer{margin:3em 0 2em;color:var(--muted);font-size:.85rem}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
@media (max-width:640px){
main,header{padding:0 14px}
header{padding-top:18px}
.cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.cards,.cards tbody{display:block}
.cards tr{display:block;border:1px solid var(--line);border-radius:6px;margin:0 0 .8em;padding:.4em .7em}
.cards th,.cards td{display:block;text-align:left;border:0;padding:.12em 0;white-space:normal}
.pairs tbody th{white-space:normal;overflow-wrap:anywhere;min-width:19ch}
.pairs td.words{width:55%}
.cards td::before{content:attr(data-head) ': ';color:var(--muted)}
}
@media print{
body{font-size:10.5pt}
nav,.legend input{display:none}
details::details-content{content-visibility:visible;display:block}
h2{break-after:avoid}
figure,tr{break-inside:avoid}
.scroll{overflow:visible}
.gallery{grid-template-columns:1fr 1fr}
figure.single{max-width:115mm}
table{font-size:8pt}
th,td{white-space:normal}
}
""" + "".join(f"body:has(#show-{i}:not(:checked)) .cond-{i}{{display:none}}" for i in range(LARGEST_TOGGLE)) + svg.STYLE
)


def page(document: Document) -> str:
    """The whole file."""
    links = [element("li", element("a", each.title, href=f"#{each.anchor}")) for each in document.sections]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", document.title),
        element("style", Markup(CSS)),
    )
    header = element(
        "header", element("h1", document.title), element("p", inline(document.subtitle), class_="subtitle")
    )
    main = element("main", *map(_section, document.sections))
    nav = element("nav", element("ul", *links), aria_label="Sections")
    # what must be read first stands above the list of what else there is
    return f"<!DOCTYPE html>\n{element('html', head, element('body', header, main_first(nav, main)), lang='en')}\n"


def main_first(nav: Markup, main: Markup) -> Markup:
    first, cut, rest = main.partition("</section>")
    return Markup(f"{first}{cut}{nav}{rest}") if cut else joined(main, nav)


def _section(section: Section) -> Markup:
    title = element("h2", element("a", section.title, href=f"#{section.anchor}"), id=f"{section.anchor}-title")
    return element(
        "section", title, *map(_block, section.blocks), id=section.anchor, aria_labelledby=f"{section.anchor}-title"
    )


def _block(block: Block) -> Markup:
    match block:
        case Paragraph(text=text, kind=kind):
            return element("p", inline(text), class_=kind or None)
        case Bullets(items=items, kind=kind):
            return element("ul", *(element("li", inline(item)) for item in items), class_=kind or None)
        case Table():
            return _table(block)
        case Figure():
            return _figure(block, "single")
        case Gallery(figures=figures):
            return element("div", *(_figure(each, None) for each in figures), class_="gallery")
        case Legend():
            return _legend(block)
        case Code(text=text, language=language):
            return element("pre", element("code", text), tabindex="0", class_="prose" if language == PROSE else None)
        case Details(summary=summary, blocks=blocks):
            return element("details", element("summary", summary), *map(_block, blocks))


def _table(table: Table) -> Markup:
    words = table.words | {0}
    heads = [
        element("th", inline(title), scope="col", role="columnheader", class_="words" if index in words else None)
        for index, title in enumerate(table.head)
    ]
    rows = [element("tr", *_cells(table, row), role="row") for row in table.rows]
    whole = element(
        "table",
        element("thead", element("tr", *heads, role="row"), role="rowgroup"),
        element("tbody", *rows, role="rowgroup"),
        class_="cards" if table.cards else "pairs" if len(table.head) == 2 else None,
        role="table",  # said outright, for what is laid out as cards is no table to a browser
        aria_label=table.caption or None,
    )
    scroll = element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=table.caption or "table")
    # beside the table and not in it, so that it neither makes the table wide nor scrolls away with it
    return joined(element("p", inline(table.caption), class_="caption"), scroll) if table.caption else scroll


def _cells(table: Table, row: Sequence[str]) -> list[Markup]:
    first, *others = row
    cells = [element("th", inline(first), scope="row", role="rowheader")]
    for index, text in enumerate(others, start=1):
        state = STATES.get(text)
        inside = element("span", text, class_=f"state {state}") if state else _lines(text)
        cells.append(
            element(
                "td", inside, role="cell", class_="words" if index in table.words else None, data_head=table.head[index]
            )
        )
    return cells


def _lines(text: str) -> Markup:
    parts: list[Markup] = []
    for part in text.split("\n"):
        parts += [element("br"), inline(part)] if parts else [inline(part)]
    return joined(*parts)


def _figure(figure: Figure, class_: str | None) -> Markup:
    caption = element("figcaption", inline(figure.caption))
    return element("figure", caption, Markup(figure.svg), class_=class_, id=f"figure-{figure.name}")


def _legend(legend: Legend) -> Markup:
    if not legend.toggles:
        return element(
            "div",
            *(element("span", element("i", class_=colour), words) for colour, words in legend.entries),
            class_="legend",
        )
    boxes = [
        element(
            "label",
            element("input", type="checkbox", checked=True, id=f"show-{index}") if index < LARGEST_TOGGLE else Markup(),
            element("i", class_=colour),
            words,
        )
        for index, (colour, words) in enumerate(legend.entries)
    ]
    return element("fieldset", element("legend", "Show"), *boxes, class_="legend")
