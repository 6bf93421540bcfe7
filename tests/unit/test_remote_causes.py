"""Ray's words for the end of a process, in ours."""

from __future__ import annotations

from ray.exceptions import ActorDiedError

from stretto.plane.ray_ledger import cause_of

RAYS = "The actor died unexpectedly before finishing this task. The actor is dead because its worker process has died. "


class Died(ActorDiedError):
    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


def test_the_end_of_a_process_is_said_plainly_and_other_texts_stay():
    """Texts as Ray 2.60 has them: of SIGKILL, of sys.exit(4), of ray.kill, of an error in the constructor."""
    killed = RAYS + (
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
        "End of file. Some common causes include: (1) the process was killed by the OOM killer"
    )
    assert cause_of(Died(killed)) == (
        "it was killed (SIGKILL: by someone, or by the kernel for want of memory), or it crashed"
    )
    left = RAYS + "Worker exit type: USER_ERROR Worker exit detail: Worker exits with an exit code 4."
    assert cause_of(Died(left)) == "it ended with exit code 4"
    for other in (
        "The actor is dead because it was killed by `ray.kill`.",
        "Worker exits with an exit code 1. Traceback (most recent call last): ValueError: no",
    ):
        assert cause_of(Died(other)) == other
