"""Policies beside the actor's whose log-probs training needs: the reference and the teacher."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from stretto.actor.old_policy import KeptForward
from stretto.observe.fingerprint import fingerprint


@dataclass(frozen=True)
class OtherPolicy:
    """``resident()`` makes its weights those that ``forward`` computes with, for as long as its body runs;
    ``fingerprint``: 16 hex digits for them. They are never trained.
    """

    family: Any
    forward: KeptForward
    resident: Callable[[], AbstractContextManager[Any]]
    fingerprint: str


def fingerprint_of(model: nn.Module) -> str:
    """16 hex digits for all weights that a module holds now."""
    return fingerprint({name: parameter.detach() for name, parameter in model.named_parameters()})
