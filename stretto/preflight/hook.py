"""The function to be called before log-probs are computed."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.machine_checks import logprob_hook
from stretto.preflight.case import Case, Fact, Line, problems_of
from stretto.types import ConfigError


def hook(case: Case) -> Iterator[Line]:
    """Imports it here, as every actor rank will; it is not called."""
    name = case.config.actor.before_logprob_hook
    if not name:
        yield Fact("none")
        return
    malformed = list(logprob_hook(case.config, case.reader))
    yield from malformed
    if malformed:
        return
    from stretto.actor.hook import load_hook

    try:
        load_hook(name)
    except ConfigError as error:
        yield from problems_of(error, "actor.before_logprob_hook")
    else:
        yield Fact(f"{name} can be called")
