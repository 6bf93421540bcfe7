"""The switches: which are on, who set them, and what would refuse each."""

from __future__ import annotations

import os
from collections.abc import Iterator

from stretto import conditions
from stretto import switches as package
from stretto.preflight.case import Case, Caution, Fact, Line
from stretto.problems import Problem
from stretto.switches.base import R_WITH_S
from stretto.wording import shown


def switches(case: Case) -> Iterator[Line]:
    """A fact for each switch; a problem for every guard of one that is on. Those of others are told where asked."""
    yield Fact(f"condition {package.condition(case.config)}")
    for switch in package.ALL:
        option = f"switches.{switch.name}"
        value = getattr(case.config.switches, switch.name)
        reasons = switch.guards(case.config)
        origin = case.reader.origins.get(option, "default")
        if switch.name == "logprob_reuse" and (dropout := _dropout_of_a_loaded_model(case)):
            reasons.append(
                f"model.path = {shown(case.config.model.path)} has attention_dropout {dropout} in config.json: with "
                "dropout the training forward is not the policy that sampled; set it to 0 there"
            )
        state = "on" if switch.on(case.config) else "off"
        yield Fact(f"{switch.letter}  {option} = {shown(value)} ({origin}): {state}")
        for reason in reasons:
            if reason == R_WITH_S and switch.on(case.config):
                continue  # the options have said it
            if switch.on(case.config):
                yield Problem((option,), f"{option} = {shown(value)}: {reason}")
            elif case.thorough:
                yield Fact(f"   could not be switched on: {reason}")
    if told := conditions.crowded(case.config, len(os.sched_getaffinity(0))):
        yield Caution(told)


def _dropout_of_a_loaded_model(case: Case) -> float:
    """What options cannot tell, since it stands in the model's own config."""
    if case.family is None or not case.config.model.path:
        return 0.0
    return float(getattr(case.family.config.text_config, "attention_dropout", 0.0) or 0.0)
