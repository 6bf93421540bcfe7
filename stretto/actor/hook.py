"""A function of the user's, called before log-probs are computed."""

from __future__ import annotations

import os
import pkgutil
from typing import Protocol

from torch import nn

from stretto.types import ConfigError


class Hook(Protocol):
    """Called on every rank once a partition, before its first forward without gradient, on the weights of the actor.

    It may set how the model computes (a routing mode, say). Whoever changes weights in it changes what is trained.
    """

    def __call__(self, *, model: nn.Module, partition: int, rank: int) -> None: ...


def load_hook(name: str) -> Hook | None:
    """The function that ``actor.before_logprob_hook`` names; None where it is empty.

    Raises:
        ConfigError: there is no such function.
    """
    if not name:
        return None
    try:
        function = pkgutil.resolve_name(name)
    except Exception as error:  # the module is the user's, and may raise anything
        raise ConfigError(
            [
                f"actor.before_logprob_hook = {name!r}: cannot be imported ({type(error).__name__}: {error}); modules "
                f"are looked for in the current directory {os.getcwd()!r}, then on PYTHONPATH and among installed "
                "packages"
            ]
        ) from error
    if not callable(function):
        raise ConfigError(
            [f"actor.before_logprob_hook = {name!r}: that is a {type(function).__name__}; name a function"]
        )
    hook: Hook = function
    return hook
