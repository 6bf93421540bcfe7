"""CPU time and memory of a process and all that descend from it, whatever starts and ends in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

Key = tuple[int, float]
"""Process id and time of its start: an id alone is given out again."""


@dataclass(frozen=True)
class Seen:
    """A process: ``parent`` is a process id, ``own_s`` the CPU time that it used, ``reaped_s`` that of the children
    whose end it has taken note of, and of theirs.
    """

    key: Key
    parent: int
    own_s: float
    reaped_s: float
    rss_bytes: int


class Tree:
    """``look`` gives the CPU seconds of all processes of the tree so far, those that have ended included.

    A process that once belonged to it stays in it when its parent ends and it becomes another's child. The time of one
    that has ended comes with its parent's ``reaped_s``; where it does not (the parent had ended before, or takes no
    note), what was last seen of it is kept. A process that both starts and ends between two looks counts, unless its
    parent takes no note of it.
    """

    def __init__(self, pid: int):
        self._root = pid
        self._known: dict[Key, Seen] = {}
        self._lost_s = 0.0
        self.rss_bytes = 0
        """Resident bytes at the last look; pages that processes share count once for each."""

    def look(self) -> float:
        self.update(processes())
        return self.total_s

    @property
    def total_s(self) -> float:
        return self._lost_s + sum(seen.own_s + seen.reaped_s for seen in self._known.values())

    def update(self, everything: Mapping[int, Seen]) -> None:
        """Take over what was found of all processes of the machine, by their ids."""
        now = {seen.key: seen for seen in members(self._root, everything, self._known.keys())}
        self._lost_s += lost_s(self._known, now)
        self._known = now
        self.rss_bytes = sum(seen.rss_bytes for seen in now.values())


def members(root: int, everything: Mapping[int, Seen], known: Iterable[Key]) -> list[Seen]:
    """The root, those already ``known``, and all that descend from any of them."""
    keys = set(known)
    children: dict[int, list[Seen]] = {}
    for seen in everything.values():
        children.setdefault(seen.parent, []).append(seen)
    todo = [seen for pid, seen in everything.items() if pid == root or seen.key in keys]
    found: dict[Key, Seen] = {}
    while todo:
        seen = todo.pop()
        if seen.key not in found:
            found[seen.key] = seen
            todo += children.get(seen.key[0], [])
    return list(found.values())


def lost_s(before: Mapping[Key, Seen], now: Mapping[Key, Seen]) -> float:
    """CPU seconds of processes that have ended between two looks, which no process that is left accounts for."""
    heirs: dict[Key | None, float] = {}
    by_pid = {key[0]: key for key in before}
    for key in before.keys() - now.keys():
        heir: Key | None = by_pid.get(before[key].parent)
        while heir is not None and heir not in now:  # its parent has ended too, and passes on what it took note of
            heir = by_pid.get(before[heir].parent)
        heirs[heir] = heirs.get(heir, 0.0) + before[key].own_s + before[key].reaped_s
    lost = heirs.pop(None, 0.0)
    for living, ended_s in heirs.items():
        if living is not None:
            lost += max(0.0, ended_s - (now[living].reaped_s - before[living].reaped_s))
    return lost


def processes() -> dict[int, Seen]:
    """All that this process may look at."""
    found = {}
    for process in psutil.process_iter(["ppid", "create_time", "cpu_times", "memory_info"]):
        facts = process.info
        if facts["cpu_times"] is not None and facts["create_time"] is not None:
            times, memory = facts["cpu_times"], facts["memory_info"]
            found[process.pid] = Seen(
                key=(process.pid, facts["create_time"]),
                parent=facts["ppid"] or 0,
                own_s=times.user + times.system,
                reaped_s=times.children_user + times.children_system,
                rss_bytes=memory.rss if memory else 0,
            )
    return found
