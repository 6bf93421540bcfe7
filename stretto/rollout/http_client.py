"""Calls to one server over HTTP: a pool of connections, time-outs, bounded retries, and errors that name the URL.

What an answer means for the engine is decided here, once:

===========================  ==========================================================================
400, 404, other 4xx          Refused (StrettoError): the server understood, and would refuse it again; never retried
429, 503, no connection      retried with growing waits, then EngineLost
a connection that ends early  as no connection; every call may be repeated, for a response is fixed by its seed
500, an unreadable answer    EngineLost
===========================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from stretto.rollout.engine import EngineLost
from stretto.types import StrettoError

RETRY_WAITS_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Waits before each further try; a server that is away for longer is lost."""
BUSY = (429, 503)
CONNECT_S = 5.0
"""How long a connection may take to be made."""
HEALTH_S = 10.0
"""How long a server may take to say that it is well: one that reads large requests answers late."""
HEALTH_EVERY_S = 5.0
HEALTH_FAILURES = 3
"""Questions in a row that get no good answer before calls that are under way are given up."""
LONGEST_MESSAGE = 1000


Body = Mapping[str, Any] | tuple[bytes, ...] | None
"""JSON: what to encode, or parts that are it when put together, which many requests may share."""


class Refused(StrettoError):
    """The server understood a request and refused it, with HTTP ``status``."""

    def __init__(self, message: str, status: int = 0):  # a default, since it is pickled by its message alone
        super().__init__(message)
        self.status = status


class HttpClient:
    """The server at ``url`` (scheme, host, port). ``timeout_s`` bounds the wait for an answer, ``connections`` the
    calls that are under way at once; others wait for their turn.
    """

    def __init__(self, url: str, *, timeout_s: float, connections: int = 256):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise StrettoError(f"rollout.servers: {url!r} is no base URL; give one such as http://10.0.0.5:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if parts.scheme == "https" else False
        self._timeout_s = timeout_s
        self._connections = connections
        self._pool: httpx.AsyncClient | None = None

    async def text(self, path: str) -> str:
        """The answer as it is. Raises as ``get``."""
        return (await self._answer("GET", path, ())).text

    async def get(self, path: str) -> Any:
        """The JSON of the answer; None where it has none.

        Raises:
            Refused: the server did.
            EngineLost: there is no server, it failed, or it stays busy.
        """
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Body = None) -> Any:
        """As ``get``."""
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Body) -> Any:
        parts = body if isinstance(body, tuple) else () if body is None else (json.dumps(body).encode(),)
        answer = await self._answer(method, path, parts)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError:
            told = f"{method} {self.url}{path}: HTTP {answer.status_code}"
            raise EngineLost(f"{told}, but its answer is not JSON: {_message(answer)}") from None

    async def _answer(self, method: str, path: str, parts: tuple[bytes, ...]) -> httpx.Response:
        waits = [*RETRY_WAITS_S]
        while True:
            try:
                answer = await self._send(method, path, parts)
            except httpx.TransportError as error:
                if isinstance(error, httpx.ReadTimeout) or not waits:
                    raise EngineLost(f"{method} {self.url}{path}: {_reason(error)}") from None
            else:
                if answer.status_code not in BUSY or not waits:
                    self._check(method, path, answer)
                    return answer
            await asyncio.sleep(waits.pop(0))

    async def _send(self, method: str, path: str, parts: tuple[bytes, ...]) -> httpx.Response:
        if self._pool is None:
            limits = httpx.Limits(max_connections=self._connections, max_keepalive_connections=self._connections)
            self._pool = self._client(limits=limits)
        timeout = httpx.Timeout(self._timeout_s, connect=CONNECT_S, pool=None)
        if not parts:
            return await self._pool.request(method, self.url + path, timeout=timeout)
        headers = {"content-type": "application/json", "content-length": str(sum(map(len, parts)))}
        return await self._pool.request(method, self.url + path, content=_each(parts), headers=headers, timeout=timeout)

    def _client(self, **options: Any) -> httpx.AsyncClient:
        # A proxy of the environment is for the world outside, not for the machine beside this one.
        return httpx.AsyncClient(verify=self._tls, trust_env=False, **options)

    def _check(self, method: str, path: str, answer: httpx.Response) -> None:
        told = f"{method} {self.url}{path}: HTTP {answer.status_code}"
        if answer.status_code >= 500 or answer.status_code in BUSY:
            raise EngineLost(f"{told}: {_message(answer)}")
        if answer.status_code >= 300:
            raise Refused(f"{told}: {_message(answer)}", answer.status_code)

    async def health(self) -> str:
        """Empty where the server says that it is well, else what is wrong. Asked once, on a connection of its own."""
        try:
            async with self._client(timeout=httpx.Timeout(HEALTH_S, connect=CONNECT_S)) as once:
                answer = await once.get(f"{self.url}/health")
        except httpx.TransportError as error:
            return f"GET {self.url}/health: {_reason(error)}"
        if answer.status_code == 200:
            return ""
        return f"GET {self.url}/health: HTTP {answer.status_code}: {_message(answer)}"

    async def healthy_within(self, seconds: float) -> None:
        """Waits until the server says that it is well: it may be starting.

        Raises EngineLost where it does not within ``seconds``.
        """
        end = asyncio.get_running_loop().time() + seconds
        while wrong := await self.health():
            if asyncio.get_running_loop().time() >= end:
                raise EngineLost(f"{wrong} (asked for {seconds:g} s)")
            await asyncio.sleep(min(1.0, seconds))

    async def watch(self) -> None:
        """Ends, by EngineLost, once the server has stopped to be well. A machine that is cut off answers nothing, and a
        call to it would wait for its whole time-out.
        """
        failures = 0
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            wrong = await self.health()
            failures = failures + 1 if wrong else 0
            if failures >= HEALTH_FAILURES:
                raise EngineLost(wrong)

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            with suppress(httpx.TransportError, RuntimeError):  # of connections that are broken already
                await pool.aclose()


async def _each(parts: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def _reason(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time" if isinstance(error, httpx.ReadTimeout) else "no connection in time"
    return str(error) or type(error).__name__


def _message(answer: httpx.Response) -> str:
    """What the server says, out of the forms that vLLM and FastAPI give it."""
    text = answer.text.strip()
    with suppress(ValueError):
        told = answer.json()
        for key in ("error", "detail", "message"):
            if isinstance(told, dict) and told.get(key):
                told = told[key]
        text = told if isinstance(told, str) else json.dumps(told)
    return text[:LONGEST_MESSAGE] or "no message"
