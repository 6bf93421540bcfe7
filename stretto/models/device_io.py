"""Weights on their way from GPU memory to GPU memory: the layout of a buffer, CUDA IPC, NCCL. Both sides use this.

NCCL is called directly (nccl.h): torch's process groups have a watchdog that ends a process whose sibling has died, and
here an engine may die and come back while its actor trains on. Its communicators are non-blocking ones, so that nobody
waits for a member that is gone.
"""

from __future__ import annotations

import ctypes
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stretto.models.weights_io import torch_dtype
from stretto.types import DeviceWeights, StrettoError, TensorMeta

ALIGN = 256
"""Every tensor begins at a multiple of this many bytes, as torch's own allocations do."""
STAMP = 8
PIECE_BYTES = 512 * 2**20
"""What one broadcast sends: the receiver holds the pieces that it has not loaded yet."""
UNIQUE_ID_BYTES = 128
JOIN_S = 60.0
"""How long the members of a group may take to find one another."""
SEND_S = 120.0
"""How long one version may take to be sent before its receiver is given up; a snapshot that is being sent is not
written to meanwhile."""
POLL_S = 0.0005


def layout(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Where tensors of so many bytes begin in a buffer, and its bytes without the stamp."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGN) * ALIGN
    return tuple(offsets), end


def meta_bytes(meta: TensorMeta) -> int:
    count = 1
    for side in meta.shape:
        count *= side
    return count * torch_dtype(meta.dtype).itemsize


def view(buffer: Tensor, meta: TensorMeta, offset: int) -> Tensor:
    """One tensor of a buffer of bytes, not copied."""
    return buffer[offset : offset + meta_bytes(meta)].view(torch_dtype(meta.dtype)).view(meta.shape)


def stamp(buffer: Tensor, size: int) -> Tensor:
    """The serial number of what a buffer holds, int64 []."""
    return buffer[size : size + STAMP].view(torch.int64)[0]


def pieces(weights: DeviceWeights, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int, range]]:
    """(first byte, last byte + 1, tensors) of each piece, which holds whole tensors."""
    ends = (*weights.offsets[1:], weights.size)
    first = 0
    for i, end in enumerate(ends):
        if i + 1 == len(ends) or ends[i + 1] - weights.offsets[first] > piece_bytes:
            yield weights.offsets[first], end, range(first, i + 1)
            first = i + 1


# CUDA IPC ----------------------------------------------------------------------------------------------------------


def gpu_uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def ipc_handle(buffer: Tensor) -> bytes:
    """What another process on this machine needs in order to see ``buffer``, which must live as long as it does."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    return pickle.dumps(arguments)


def open_ipc(handles: Mapping[str, bytes], device: torch.device) -> Tensor:
    """The buffer of ``ipc_handle`` in another process. Raises StrettoError where none of them lies on this GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuid = gpu_uuid(device)
    if uuid not in handles:
        raise StrettoError(
            f"the weights lie on GPU {', '.join(handles)} and this engine is on {uuid}: CUDA IPC needs both on one; "
            'set cluster.colocate, or rollout.weight_transfer to "host" or "nccl"'
        )
    arguments = list(pickle.loads(handles[uuid]))
    arguments[6] = device.index  # the same GPU may have another number here
    buffer: Tensor = rebuild_cuda_tensor(*arguments)
    return buffer


# NCCL --------------------------------------------------------------------------------------------------------------


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.14, the first to have ``blocking``: by ``size`` and ``version`` later releases know
    that the rest is to be as they have it by default.
    """

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


_MAGIC, _VERSION = 0xCAFEBEEF, 21400
_UINT8 = 1  # ncclUint8
_SUCCESS, _IN_PROGRESS = 0, 7


def _nccl() -> ctypes.CDLL:
    library = ctypes.CDLL("libnccl.so.2")  # the one that torch has loaded
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config),
    ]  # fmt: skip
    library.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    library.ncclBroadcast.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    library.ncclCommAbort.argtypes = [ctypes.c_void_p]
    return library


def _check(library: ctypes.CDLL, code: int, what: str) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        raise StrettoError(f"NCCL could not {what}: {library.ncclGetErrorString(code).decode()}")


def unique_id() -> bytes:
    """Of a group that is about to be made; all of its members need it."""
    library, made = _nccl(), _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(made)), "begin a group")
    return bytes(made)


class Communicator:
    """One member of a group. No call waits for the other members without a limit, and ``abort``, from any thread, ends
    those that wait.

    ``deadline``, everywhere: of ``time.monotonic()``. At it, and where the group has failed, it is given up and
    StrettoError raised.
    """

    def __init__(self, group: bytes, rank: int, world: int, device: torch.device):
        """Begins to join. No more than ``settle`` and ``abort`` before ``settle`` has returned once."""
        self._library = _nccl()
        self._comm = ctypes.c_void_p()
        self._using = threading.Lock()  # NCCL frees what it aborts, whoever uses it
        self._doing = f"join the group that sends weights (rank {rank} of {world})"
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _VERSION, 0)
        with torch.cuda.device(device):
            code = self._library.ncclCommInitRankConfig(
                ctypes.byref(self._comm), world, _UniqueId.from_buffer_copy(group), rank, ctypes.byref(config)
            )
        _check(self._library, code, self._doing)

    def broadcast(self, buffer: Tensor, root: int, stream: torch.cuda.Stream, deadline: float) -> None:
        """Queue on ``stream``: the bytes of ``root``'s buffer in everyone's. Returns once it is queued."""
        pointer = ctypes.c_void_p(buffer.data_ptr())
        self._doing = "send weights"
        with self._using:
            code = self._library.ncclBroadcast(
                pointer, pointer, buffer.numel(), _UINT8, root, self._alive(), ctypes.c_void_p(stream.cuda_stream)
            )
        _check(self._library, code, self._doing)
        self.settle(deadline)

    def settle(self, deadline: float, done: Callable[[], bool] = lambda: True) -> None:
        """Returns once NCCL has done what it was asked for, and ``done`` says that the device has, too."""
        try:
            while self._in_progress() or not done():
                if time.monotonic() > deadline:
                    raise StrettoError(f"NCCL could not {self._doing} in time")
                time.sleep(POLL_S)
        except StrettoError:
            self.abort()
            raise

    def _in_progress(self) -> bool:
        state = ctypes.c_int()
        with self._using:
            code = self._library.ncclCommGetAsyncError(self._alive(), ctypes.byref(state))
        _check(self._library, code or state.value, self._doing)
        return state.value == _IN_PROGRESS

    def _alive(self) -> ctypes.c_void_p:
        if not self._comm:
            raise StrettoError("the group that sends weights was given up")
        return self._comm

    def abort(self) -> None:
        """End it at once, whatever it waits for."""
        with self._using:
            comm, self._comm = self._comm, ctypes.c_void_p()
            if comm:
                self._library.ncclCommAbort(comm)
