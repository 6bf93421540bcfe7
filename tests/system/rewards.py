"""Reward functions that the system tests name in their recipes."""

import re


def variety(response: str, answer: str) -> float:
    """Distinct characters: something that a random model differs in from sample to sample."""
    return len(set(response)) / 8


def sometimes(response: str, answer: str, row_id: str) -> float:
    """Fails for the samples of every fourth row."""
    if int(re.findall(r"\d+", row_id)[-1]) % 4 == 0:
        raise ValueError("no reward for this row")
    return variety(response, answer)


def never(response: str, answer: str) -> float:
    raise RuntimeError("the grader is down")
