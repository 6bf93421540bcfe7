"""Environment controls of the switches, as launchers set them. Importing this module loads no torch, ray or
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

CONTROLS = {
    "MM_PROCESSOR_POOL_SIZE": "switches.processor_pool",
    "HYBRID_REUSE_TRAIN_LOGPROBS": "switches.logprob_reuse",
    "HYBRID_PIPELINE_FORWARD": "switches.chunk_overlap",
}
"""Control -> the option that it sets."""
POOL_SIZE = "MM_PROCESSOR_POOL_SIZE"


def read_controls(environ: Mapping[str, str]) -> Iterator[tuple[str, str, int | bool | None]]:
    """``(control, option, value)`` of each control that is set; None for a value of another form than it accepts."""
    for control, option in CONTROLS.items():
        if control in environ:
            text = environ[control]
            if control == POOL_SIZE:
                plain = text.isascii() and text.isdigit() and len(text) < 10 and text == str(int(text))
                yield control, option, int(text) if plain else None
            else:
                yield control, option, {"0": False, "1": True}.get(text)


def accepted(control: str) -> str:
    """The forms that a control accepts, in words."""
    return "an integer of at least 0, such as 8" if control == POOL_SIZE else "0 or 1"
