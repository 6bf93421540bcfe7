"""The process that processes prompts for the pool, and how the two talk. Started as a file, so it imports numpy and the
standard library, then what the process function needs: not the caller's ``__main__``.

A message is one pickled value, its arrays beside the pickle, written to a file in memory (memfd) that both sides map;
a Unix socket only says that it is there. The file has no name anywhere, so the kernel frees it with the last process
that holds it, whatever ends that process. Each direction has one file, written again by every message: new memory costs
as much time as a third of the work on an image. Arrays are copied out of it, so nobody keeps it.

In: one setup dictionary, then one prompt per job. Out: ``("ready",)`` or ``("refused", reason)``; per job ``("done",
result)``, ``("failed", text, traceback)``, or ``("unreadable", reason)`` and ``("unsendable", reason)`` where the job
or its result does not survive the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

FILE_NAME = "stretto-processor"
ALIGNMENT = 64
KEPT_BYTES = 128 * 2**20
"""What a direction keeps of its memory after a larger message."""
PR_SET_PDEATHSIG = 1
_NOTE = struct.Struct("=QQ")  # bytes of the message, parts of it


def pack(value: Any) -> list[memoryview]:
    """The pickle of ``value`` and the buffers beside it, not copied. Raises whatever pickling raises."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return [memoryview(stream), *(buffer.raw() for buffer in buffers)]


def unpack(parts: Sequence[Any]) -> Any:
    """The value of a message; its arrays lie in ``parts``. Raises whatever unpickling raises."""
    return pickle.loads(parts[0], buffers=parts[1:])


class _Memory:
    """A file in memory, as one side has it mapped."""

    def __init__(self, file: int):
        self.file = file
        self.unmap()

    def to_write(self, size: int) -> np.ndarray:
        """The first ``size`` bytes, made to exist. Raises OSError: no memory."""
        if size > len(self._mapped):
            os.posix_fallocate(self.file, 0, size)  # an error here, where writing to a hole would end the process
        elif size <= KEPT_BYTES < len(self._mapped):
            os.ftruncate(self.file, KEPT_BYTES)
            self._map()
        return self.to_read(size)

    def to_read(self, size: int) -> np.ndarray:
        if size > len(self._mapped):
            self._map()
        return self._mapped[:size]

    def unmap(self) -> None:
        self._mapped = np.zeros(0, np.uint8)

    def _map(self) -> None:
        self._mapped = np.frombuffer(mmap.mmap(self.file, os.fstat(self.file).st_size), np.uint8)


class Channel:
    """One side of a connection on which the two sides speak in turn. Takes over the descriptors of two files in
    memory, ``outbox`` being the other side's ``inbox``.
    """

    def __init__(self, connection: socket.socket, outbox: int, inbox: int):
        self.connection = connection
        self.outbox, self.inbox = _Memory(outbox), _Memory(inbox)

    def send(self, parts: Sequence[memoryview]) -> int:
        """Returns the bytes moved.

        Raises:
            ConnectionError: nobody is there.
            OSError: no memory.
        """
        lengths = [len(part) for part in parts]
        table = memoryview(np.array(lengths, np.uint64).tobytes())
        total, begins = _layout([len(table), *lengths])
        memory = self.outbox.to_write(total)
        for part, begin in zip([table, *parts], begins, strict=True):
            memory[begin : begin + len(part)] = np.frombuffer(part, np.uint8)  # lets other threads run
        self.connection.send(_NOTE.pack(total, len(parts)))
        return total

    def receive(self) -> list[np.ndarray]:
        """The parts of the next message, copied.

        Raises:
            ConnectionError: nobody is there any more.
            OSError: no memory.
        """
        note = self.connection.recv(_NOTE.size)
        if not note:
            raise ConnectionError("the other side has ended")
        total, count = _NOTE.unpack(note)
        memory = self.inbox.to_read(total)
        lengths = memory[: 8 * count].view(np.uint64).tolist()
        _, begins = _layout([8 * count, *lengths])
        return [memory[begin : begin + n].copy() for begin, n in zip(begins[1:], lengths, strict=True)]

    def close(self) -> None:
        self.connection.close()
        for memory in (self.outbox, self.inbox):
            os.close(memory.file)
            memory.unmap()


def _layout(lengths: Sequence[int]) -> tuple[int, list[int]]:
    """The bytes of all parts together, and where each begins."""
    begins, end = [], 0
    for length in lengths:
        begins.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = begins[-1] + length
    return end, begins


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _hold_standard_streams() -> None:
    """Give the numbers of standard streams that were closed to /dev/null, or the next file to be opened gets them."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)


def serve(channel: Channel) -> None:
    """Setup, then jobs, until the other side is gone."""
    setup = unpack(channel.receive())
    sys.path[:] = setup["path"]
    try:
        from stretto.data.processor import failure

        function = pickle.loads(setup["function"])
    except Exception as error:  # the modules that it needs may raise anything
        channel.send(pack(("refused", _line(error))))
        return
    channel.send(pack(("ready",)))
    while True:
        _serve_one(channel, function, failure)


def _serve_one(
    channel: Channel, function: Callable[[Any], Any], failure: Callable[[Any, BaseException], Exception]
) -> None:
    """One job. What goes wrong with it is told, and the process goes on."""
    parts = channel.receive()
    try:
        prompt = unpack(parts)
    except Exception as error:
        channel.send(pack(("unreadable", _line(error))))
        return
    try:
        answer: tuple[Any, ...] = ("done", function(prompt))
    except (Exception, SystemExit) as error:
        answer = ("failed", str(failure(prompt, error)), traceback.format_exc())
    try:
        channel.send(pack(answer))
    except ConnectionError:
        raise
    except Exception as error:
        channel.send(pack(("unsendable", _line(error))))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    number, outbox, inbox, parent = (int(argument) for argument in sys.argv[1:])
    _die_with_parent(parent)
    _hold_standard_streams()
    for file in (number, outbox, inbox):
        os.set_inheritable(file, False)
    with contextlib.suppress(ConnectionError):
        serve(Channel(socket.socket(fileno=number), outbox, inbox))
