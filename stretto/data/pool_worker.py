"""The process that processes prompts for the pool, and how messages pass between the two. Started as a file, so it
imports the standard library, then what the process function needs: not the caller's ``__main__``.

A message is one pickled value in an anonymous file in memory (memfd), handed over through a Unix socket. The file has
no name anywhere, so the kernel frees it with the last process that holds it, whatever ends that process. The arrays of
the value are read where they lie, without a copy::

    bytes of every part, uint64 [1 + parts] | the pickle | large buffer | large buffer | ...    each at a multiple of 64

In over the socket: one setup dictionary, then one prompt per job. Out: ``("ready",)`` or ``("refused", reason)``; per
job ``("done", result)``, ``("failed", text, traceback)``, or ``("unreadable", reason)`` and ``("unsendable", reason)``
where the job or its result does not survive the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

IN_PICKLE_BYTES = 64 * 1024
"""Smaller buffers travel in the pickle, and are copied: so nothing small keeps the memory of its large neighbours."""
ALIGNMENT = 64
FILE_NAME = "stretto-processor"
PR_SET_PDEATHSIG = 1

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def pack(value: Any) -> int:
    """A file in memory that holds ``value``; the caller closes it. Raises whatever pickling raises."""
    large: list[pickle.PickleBuffer] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < IN_PICKLE_BYTES:
            return True
        large.append(buffer)
        return False

    stream = pickle.dumps(value, 5, buffer_callback=stays)
    parts = [memoryview(stream), *(buffer.raw() for buffer in large)]
    lengths = [len(part) for part in parts]
    table = memoryview(struct.pack(f"={1 + len(parts)}Q", len(parts), *lengths))
    file = os.memfd_create(FILE_NAME)
    try:
        for part, begin in zip([table, *parts], [0, *_begins(lengths)], strict=True):
            while part:
                written = os.pwrite(file, part, begin)
                part, begin = part[written:], begin + written
    except BaseException:
        os.close(file)
        raise
    return file


def unpack(memory: memoryview) -> Any:
    """The value of a message. Its large arrays keep ``memory``. Raises whatever unpickling raises."""
    (count,) = struct.unpack_from("=Q", memory)
    lengths = struct.unpack_from(f"={count}Q", memory, 8)
    parts = [memory[begin : begin + n] for begin, n in zip(_begins(lengths), lengths, strict=True)]
    return pickle.loads(parts[0], buffers=parts[1:])


def _begins(lengths: Sequence[int]) -> Iterator[int]:
    end = 8 * (1 + len(lengths))
    for length in lengths:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        yield begin
        end = begin + length


def hand_over(connection: socket.socket, file: int) -> int:
    """Sends a packed message and closes ``file``; its size in bytes. Raises ConnectionError: nobody is there."""
    try:
        size = os.fstat(file).st_size
        socket.send_fds(connection, [b"m"], [file])
        return size
    finally:
        os.close(file)


def take_over(connection: socket.socket) -> memoryview:
    """The memory of the next message. It is freed with the last array that lies in it.

    Raises:
        ConnectionError: nobody is there any more.
        OSError: no memory, or too many open files.
    """
    message, files, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not message:
        raise ConnectionError("the other side has ended")
    if not files:  # the kernel drops what a process may not open any more
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        return _mapped(files[0])
    finally:
        os.close(files[0])


def _mapped(file: int) -> memoryview:
    """All of ``file``. Python's own mmap would keep a descriptor open for as long as the memory is in use, and there
    may be more prompts in memory than a process may have files.
    """
    size = os.fstat(file).st_size
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(None, size, access, mmap.MAP_SHARED | mmap.MAP_POPULATE, file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False  # arrays may be in use until the very end
    return memoryview(memory)


def _die_with_parent(parent: int) -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _hold_standard_streams() -> None:
    """Give the numbers of standard streams that were closed to /dev/null, or files in memory would get them."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)


def serve(connection: socket.socket) -> None:
    """Setup, then jobs, until the other side is gone."""
    setup = unpack(take_over(connection))
    sys.path[:] = setup["path"]
    try:
        from stretto.data.processor import failure

        function = pickle.loads(setup["function"])
    except Exception as error:  # the modules that it needs may raise anything
        hand_over(connection, pack(("refused", _line(error))))
        return
    hand_over(connection, pack(("ready",)))
    while True:
        memory = take_over(connection)
        hand_over(connection, _answer(function, failure, memory))
        del memory


def _answer(function: Callable[[Any], Any], failure: Callable[[Any, BaseException], Exception], memory: Any) -> int:
    """The packed answer to one job. What goes wrong with a job is told, and the process goes on."""
    try:
        prompt = unpack(memory)
    except Exception as error:
        return pack(("unreadable", _line(error)))
    try:
        result = function(prompt)
    except (Exception, SystemExit) as error:
        return pack(("failed", str(failure(prompt, error)), traceback.format_exc()))
    try:
        return pack(("done", result))
    except Exception as error:
        return pack(("unsendable", _line(error)))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    number, parent_id = (int(argument) for argument in sys.argv[1:])
    _die_with_parent(parent_id)
    _hold_standard_streams()
    os.set_inheritable(number, False)
    with socket.socket(fileno=number) as ours, contextlib.suppress(ConnectionError):
        serve(ours)
