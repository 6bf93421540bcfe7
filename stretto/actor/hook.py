"""A function of the user's, called before log-probs are computed."""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import sys
from typing import Protocol

from torch import nn

from stretto.types import ConfigError, StrettoError


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
    if os.getcwd() not in sys.path:  # as rewards, hooks are found in the current directory
        sys.path.insert(0, os.getcwd())
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
    try:
        inspect.signature(function).bind(model=None, partition=0, rank=0)
    except TypeError as error:
        raise ConfigError(
            [
                f"actor.before_logprob_hook = {name!r}: cannot be called as function(model=..., partition=..., "
                f"rank=...): {error}"
            ]
        ) from None

    @functools.wraps(function)
    def hook(*, model: nn.Module, partition: int, rank: int) -> None:
        try:
            function(model=model, partition=partition, rank=rank)
        except Exception as error:  # the function is the user's
            raise StrettoError(
                f"actor.before_logprob_hook = {name!r} raised {type(error).__name__}: {error}, for partition "
                f"{partition} on rank {rank}"
            ) from error

    return hook
