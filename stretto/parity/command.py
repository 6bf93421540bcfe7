"""``stretto parity compare``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stretto.observe.lineage import write_atomically
from stretto.parity import table
from stretto.parity.bisect import bisect, nothing
from stretto.parity.compare import compare, require_another
from stretto.types import ConfigError, StrettoError

EXIT_NOT_COMPARED = 2
"""No table, or no bisection, came of it: an exit code of 1 says that a row failed, and nothing else."""


def compare_runs(
    a: Path,
    b: Path,
    control: Path | None = None,
    *,
    updates: int | None = None,
    out: Path | None = None,
    bisected: bool,
) -> int:
    """Prints the table, writes it to ``out``; the exit code: of the verdict, or 2 where runs do not compare, a folder
    cannot be read, or a run cannot be repeated.

    Raises:
        ConfigError: ``bisected`` without ``out``, where its runs would go.
    """
    if bisected and out is None:
        raise ConfigError(["--bisect: both runs are run again in OUT/bisect; name a folder with --out"])
    try:
        return _compared(a, b, control, updates, out, bisected)
    except StrettoError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_COMPARED


def _compared(a: Path, b: Path, control: Path | None, updates: int | None, out: Path | None, bisected: bool) -> int:
    if control is not None:
        require_another(b, control)
    verdict = compare(a, b, control, updates=updates)
    print(table.text(verdict))
    if out is not None:
        table.write(verdict, out)
        print(f"\nwritten             {out / 'parity.md'}, {out / 'parity.json'}")
    if bisected and out is not None:
        found = bisect(verdict, out / "bisect")
        if found is None:
            print(nothing(verdict))
        else:
            print(found.text())
            write_atomically(out / "bisect.json", (json.dumps(table.strict(found.plain()), indent=1) + "\n").encode())
    return verdict.exit_code
