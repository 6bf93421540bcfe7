"""Every row of the collected public reports that a release answers for has tests of its own, marked with its id."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = (
    "A1", "A4", "A5", "B1", "B4", "B5", "C1", "C2", "C4", "D1", "D2", "D3", "D5", "D6", "E1", "E3", "E4", "E5", "F1",
    "F2", "G1", "G2", "S7",
)  # fmt: skip


def marked_rows(source: str) -> set[str]:
    """The arguments of every ``pytest.mark.case("…")`` in a text, on a test, a parameter or a whole module."""
    return {
        argument.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


@functools.cache
def marked() -> dict[str, list[str]]:
    """Row -> the test files that are marked with it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path != Path(__file__):
            for row in marked_rows(path.read_text(encoding="utf-8")):
                found.setdefault(row, []).append(path.name)
    return found


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_test(row):
    assert row in marked(), f'no test is marked @pytest.mark.case("{row}")'


def test_marks_are_found_wherever_they_stand():
    source = (
        'pytestmark = [pytest.mark.timeout(9), pytest.mark.case("X1")]\n'
        '@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.case("X2"))])\n'
        '@pytest.mark.case("X3")\ndef test(a): "pytest.mark.case(4)"\n'
        'class TestThis:\n    @pytest.mark.case("X5")\n    async def test(self): pass\n'
    )
    assert marked_rows(source) == {"X1", "X2", "X3", "X5"}


def test_rows_that_are_marked_have_the_form_of_an_id():
    assert all(row[0] in "ABCDEFGHS" and row[1:].isdigit() for row in marked())
