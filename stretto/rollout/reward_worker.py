"""The process that runs a reward function. Started as a file, so it imports the standard library and the user's module
only: not stretto, not the caller's ``__main__``.

In over the connection: one setup dictionary, then one job dictionary per prompt group. Out: ``("ready",)`` or
``("refused", reason)``; per job ``("begun",)``, then per response, in order, ``(kind, value, detail)``:

========  ==============================================================
score     the reward as a float
abstain   the function returned None
nonfinite the repr of a NaN or an infinity
raised    the exception in one line; ``detail`` is its traceback
type      the name of a type that is no reward; the rest is not scored
========  ==============================================================
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

INFO = ("row_id", "source", "messages", "finish_reason")
"""Keywords that a reward function may ask for, beside ``response`` and ``answer``."""

PR_SET_PDEATHSIG = 1
Outcome = tuple[str, Any, str]


def exact_match(response: str, answer: str) -> float:
    """1.0 where the response is the answer, white space around them aside; else 0.0."""
    return 1.0 if response.strip() == answer.strip() else 0.0


def resolve(name: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The function that ``reward.function = name`` means, and which of ``INFO`` it takes.

    Raises:
        ValueError: with what is wrong and the remedy.
    """
    if name == "exact_match":
        return exact_match, ()
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ValueError("not a known name; write exact_match or module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's, and may raise anything
        raise ValueError(
            f"module {module_name!r} cannot be imported ({_one_line(error)}); modules are looked for in the current "
            f"directory {os.getcwd()!r}, then on PYTHONPATH and among installed packages"
        ) from error
    try:
        function = getattr(module, attribute)
    except AttributeError:
        raise ValueError(
            f"{module.__file__ or module_name} has no {attribute!r}; give the name of a function in it"
        ) from None
    if not callable(function):
        raise ValueError(f"{attribute!r} is a {type(function).__name__}; give the name of a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError("it is asynchronous; give a plain function, it runs in a process of its own and may block")
    return function, _wanted_info(function)


def _wanted_info(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return ()
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    if positional[:1] == ["answer"] or positional[1:] == ["response"]:
        raise ValueError(f"its signature is {signature}, but the response comes first and the answer second; swap them")
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = tuple(name for name in INFO if takes_all or name in keywords)
    try:
        signature.bind("response", "answer", **dict.fromkeys(wanted))
    except TypeError as error:
        raise ValueError(
            f"cannot be called as function(response, answer): {error}; its signature is {signature}; let it take "
            f"(response, answer) and, if it likes, any of {', '.join(INFO)}"
        ) from None
    return wanted


def judge(value: Any) -> Outcome:
    """What a returned value counts as; see the table of this module."""
    if value is None:
        return "abstain", None, ""
    numpy = sys.modules.get("numpy")
    numbers = (int, float) if numpy is None else (int, float, numpy.bool_, numpy.integer, numpy.floating)
    if not isinstance(value, numbers):  # bool is an int
        return "type", type(value).__name__, ""
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        return "nonfinite", "an integer too large for a float", ""
    return ("score", number, "") if math.isfinite(number) else ("nonfinite", repr(number), "")


def _score(function: Callable[..., Any], arguments: tuple[str, str], info: dict[str, Any]) -> Outcome:
    try:
        return judge(function(*arguments, **info))
    except (Exception, SystemExit) as error:  # the function is the user's, and may raise anything
        return "raised", _one_line(error), traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a timer left running would kill the next sample


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _guard(ends: int, connection: int) -> None:
    """Fork a guardian, which kills this session, itself included, once the pipe ``ends`` has no writer any more: the
    parent was killed, and what the reward function has started must not outlive it.
    """
    if os.fork() == 0:
        os.close(connection)
        os.read(ends, 1)
        os.killpg(0, signal.SIGKILL)
    os.close(ends)


def serve(connection: Connection) -> None:
    """Setup, then jobs, until the other end closes the connection."""
    setup = connection.recv()
    sys.path[:] = setup["path"]
    try:
        function, wanted = resolve(setup["function"])
    except ValueError as error:
        connection.send(("refused", str(error)))
        return
    connection.send(("ready",))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(("begun",))
        for response, finish_reason in job["responses"]:
            known = {**job["info"], "finish_reason": finish_reason}
            outcome = _score(function, (response, job["answer"]), {key: known[key] for key in wanted})
            connection.send(outcome)
            if outcome[0] == "type":
                break


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    file, ends, parent = (int(argument) for argument in sys.argv[1:])
    _guard(ends, file)
    _die_with_parent(parent)
    os.set_inheritable(file, False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what it prints must survive a kill
    serve(Connection(file))
