"""Reward functions that the system tests name in their recipes."""

import re
import subprocess
import time


def variety(response: str, answer: str) -> float:
    """Distinct characters: something that a random model differs in from sample to sample."""
    return len(set(response)) / 8


def tells_its_row(response: str, answer: str, row_id: str) -> float:
    """The number of the row, and less than 1 that samples differ in."""
    return row_of(row_id) + min(len(set(response)), 9) / 10


def even_rows_differ(response: str, answer: str, row_id: str) -> float:
    """Tells its row as ``tells_its_row``; samples of an odd row are all worth the same."""
    return tells_its_row(response, answer, row_id) if row_of(row_id) % 2 == 0 else float(row_of(row_id))


def late(response: str, answer: str, row_id: str) -> float:
    """Takes its time for every other row, so that groups of one partition come one after the other."""
    time.sleep(0.1 if row_of(row_id) % 2 else 0.0)
    return variety(response, answer)


def row_of(row_id: str) -> int:
    return int(re.findall(r"\d+", row_id)[-1])


def sometimes(response: str, answer: str, row_id: str) -> float:
    """Fails for the samples of every fourth row, and hangs for those of every eighth."""
    if row_of(row_id) % 4 == 0:
        raise ValueError("no reward for this row")
    if row_of(row_id) % 8 == 2:
        time.sleep(600)
    return variety(response, answer)


def fails_from_row_8(response: str, answer: str, row_id: str) -> float:
    if row_of(row_id) >= 8:
        raise RuntimeError("the grader is down")
    return variety(response, answer)


started: list[subprocess.Popen] = []


def spawning(response: str, answer: str) -> float:
    """The first call of a process prints, and starts another process."""
    if not started:
        print("a reward prints this")
        started.append(subprocess.Popen(["sleep", "600"]))
    return variety(response, answer)
