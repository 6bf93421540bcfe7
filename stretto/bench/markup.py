"""Elements of HTML and SVG as text, with everything escaped that is not an element itself."""

from __future__ import annotations

import html
import re

VOID = frozenset({"meta", "input", "br", "col"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """``element("p", "a < b", class_="note")``. Of attribute names a last underscore falls away and others are
    hyphens; None and False leave one out, True writes it bare, and numbers have at most two decimals.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key if key in ("viewBox", "preserveAspectRatio") else key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        else:
            words.append(f'{key}="{html.escape(value if isinstance(value, str) else short(value))}"')
    inside = "".join(child if isinstance(child, Markup) else html.escape(child, quote=False) for child in children)
    return Markup(f"<{' '.join(words)}>" if name in VOID else f"<{' '.join(words)}>{inside}</{name}>")


def short(value: float) -> str:
    """A coordinate: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def joined(*parts: str) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part, quote=False) for part in parts))


def inline(text: str) -> Markup:
    """Text with `code` and **strong** words. No line breaks before a percent sign."""
    parts = []
    for part in re.split(r"(`[^`]+`|\*\*[^*]+\*\*)", text):
        if part.startswith("`") and part.endswith("`") and len(part) > 2:
            parts.append(element("code", part[1:-1]))
        elif part.startswith("**") and part.endswith("**") and len(part) > 4:
            parts.append(element("strong", inline(part[2:-2])))
        else:
            parts.append(Markup(html.escape(re.sub(r"(?<=\d) %", "\u00a0%", part), quote=False)))
    return joined(*parts)
