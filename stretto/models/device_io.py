"""Weights on their way from GPU memory to GPU memory: the layout of a buffer, CUDA IPC, NCCL. Both sides use this.

NCCL is called directly (nccl.h): torch's process groups have a watchdog that ends a process whose sibling has died, and
here an engine may die and come back while its actor trains on.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Iterator, Mapping, Sequence

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


_UINT8 = 1  # ncclUint8


def _nccl() -> ctypes.CDLL:
    library = ctypes.CDLL("libnccl.so.2")  # the one that torch has loaded
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int]
    library.ncclBroadcast.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    library.ncclCommAbort.argtypes = [ctypes.c_void_p]
    return library


def _check(library: ctypes.CDLL, code: int, what: str) -> None:
    if code != 0:
        raise StrettoError(f"NCCL could not {what}: {library.ncclGetErrorString(code).decode()}")


def unique_id() -> bytes:
    """Of a group that is about to be made; all of its members need it."""
    library, made = _nccl(), _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(made)), "begin a group")
    return bytes(made)


class Communicator:
    """One member of a group; made once all members are there. ``abort`` may be called from any thread, the rest from
    one at a time."""

    def __init__(self, group: bytes, rank: int, world: int, device: torch.device):
        self._library = _nccl()
        self._comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            code = self._library.ncclCommInitRank(
                ctypes.byref(self._comm), world, _UniqueId.from_buffer_copy(group), rank
            )
        _check(self._library, code, f"join the group that sends weights (rank {rank} of {world})")

    def broadcast(self, buffer: Tensor, root: int, stream: torch.cuda.Stream) -> None:
        """Queue on ``stream``: the bytes of ``root``'s buffer in everyone's."""
        pointer = ctypes.c_void_p(buffer.data_ptr())
        code = self._library.ncclBroadcast(
            pointer, pointer, buffer.numel(), _UINT8, root, self._comm, ctypes.c_void_p(stream.cuda_stream)
        )
        _check(self._library, code, "send weights")

    def abort(self) -> None:
        """End it at once, whatever it waits for."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)
