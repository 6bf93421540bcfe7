"""Hashes of tensors that survive sharding, and the raw per-sample values of every update.

The hash of a flat tensor is ``sum_i w(i) * bits_i mod 2**64`` over its logical (row-major) indexes i:

- ``bits_i`` are the element's raw bits as a signed integer of its width; elements wider than four bytes count as
  consecutive four-byte words, low word first. So 0.0 and -0.0 differ, and every NaN payload counts.
- ``w(i) = u(i mod 2**16) * v(i div 2**16)`` with u, v odd and pseudo-random (splitmix64 of disjoint counters). An odd
  multiplier maps any single flipped bit to a non-zero difference, so that flip is always seen.

Being a sum, it does not depend on who computes which part: ``element_sum(whole) == element_sum(shard0, 0) +
element_sum(shard1, len0) mod 2**64``. It guards against accidents; it is no cryptographic hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor | np.ndarray

BLOCK = 1 << 16
MASK = (1 << 64) - 1
_TORCH_CHUNK_BLOCKS = 256  # blocks per torch operation: bounds its int64 temporary at 128 MiB
_U_COUNTER, _V_COUNTER, _ROW_COUNTER = 1 << 32, 1 << 33, 1 << 34  # where each family of multipliers starts counting
_LENGTH_MULTIPLIER = 0x9E3779B97F4A7C15


def _splitmix64(counter: np.ndarray) -> np.ndarray:
    """uint64 [n] -> uint64 [n]: output number ``counter`` of splitmix64 (Steele, Lea, Flood 2014) seeded with 0."""
    z = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _multipliers(family: int, start: int, count: int) -> np.ndarray:
    """Odd int64 [count] multipliers ``start, start + 1, …`` of a family."""
    counter = np.arange(family + start, family + start + count, dtype=np.uint64)
    return (_splitmix64(counter) | np.uint64(1)).view(np.int64)


@cache
def _u() -> np.ndarray:
    return _multipliers(_U_COUNTER, 0, BLOCK)


@cache
def _u_torch(device: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(_u()).to(device)


def _v_torch(device: str, block: int, count: int) -> torch.Tensor:
    table = _v_table_torch(device)
    if block + count <= len(table):
        return table[block : block + count]  # a copy from the host would wait for the device, once a piece
    import torch

    return torch.from_numpy(_v(block, count)).to(device)


@cache
def _v_table_torch(device: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(_v_table()).to(device)


@cache
def _v_table() -> np.ndarray:
    return _multipliers(_V_COUNTER, 0, 1 << 14)


def _v(block: int, count: int = 1) -> np.ndarray:
    table = _v_table()
    return table[block : block + count] if block + count <= len(table) else _multipliers(_V_COUNTER, block, count)


def _words(tensor: Tensor) -> Any:
    """The raw bits, flat in logical order, as signed integers of at most 32 bits; and the words per element.

    A numpy array for numpy and CPU tensors, a torch tensor for the others.
    """
    if not isinstance(tensor, np.ndarray):
        import torch

        size = tensor.element_size()
        signed = {1: torch.int8, 2: torch.int16}.get(size, torch.int32)
        bits = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(signed)
        return (bits.numpy() if bits.device.type == "cpu" else bits), max(1, size // 4)
    if tensor.dtype.hasobject or tensor.dtype.kind in "USV":
        raise TypeError(f"an array of dtype {tensor.dtype} has no bits to fingerprint")
    size = tensor.dtype.itemsize
    flat = np.ascontiguousarray(tensor).reshape(-1).view(f"i{min(size, 4)}")
    return flat, max(1, size // 4)


def _pieces(start: int, length: int) -> Iterable[tuple[int, int]]:
    """Splits [start, start + length) into a head up to a block border, a run of whole blocks, and a tail."""
    end = start + length
    first = min(end, -(-start // BLOCK) * BLOCK)
    last = max(first, end // BLOCK * BLOCK)
    return [(a, b) for a, b in ((start, first), (first, last), (last, end)) if b > a]


def _sum_numpy(words: np.ndarray, start: int) -> int:
    total = 0
    for a, b in _pieces(start, len(words)):
        part = words[a - start : b - start]
        if a % BLOCK or b - a < BLOCK:
            at = a % BLOCK
            total += int(np.einsum("i,i->", part, _u()[at : at + b - a])) * int(_v(a // BLOCK)[0])
        else:
            sums = np.einsum("bi,i->b", part.reshape(-1, BLOCK), _u())
            total += int(np.einsum("b,b->", sums, _v(a // BLOCK, len(sums))))
    return total & MASK


def _sum_torch(words: torch.Tensor, start: int) -> torch.Tensor:
    """int64 scalar on the tensor's device; integer arithmetic wraps, as it must."""
    import torch

    u = _u_torch(str(words.device))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for a, b in _pieces(start, words.numel()):
        part = words[a - start : b - start]
        if a % BLOCK or b - a < BLOCK:
            at = a % BLOCK
            total += (part * u[at : at + b - a]).sum() * int(_v(a // BLOCK)[0])
            continue
        for i, blocks in enumerate(part.view(-1, BLOCK).split(_TORCH_CHUNK_BLOCKS)):
            v = _v_torch(str(words.device), a // BLOCK + i * _TORCH_CHUNK_BLOCKS, len(blocks))
            total += ((blocks * u).sum(1) * v).sum()
    return total


def element_sum(tensor: Tensor, offset: int = 0) -> int:
    """The hash of a tensor, in [0, 2**64). ``offset`` is the logical index of its first element within the whole.

    Any shape and dtype, numpy or torch, on any device. Raises TypeError for arrays of objects or strings.
    """
    words, per_element = _words(tensor)
    start = offset * per_element
    if isinstance(words, np.ndarray):
        return _sum_numpy(words, start)
    return int(_sum_torch(words, start)) & MASK


@dataclasses.dataclass(frozen=True)
class TensorSum:
    """The hash of one named tensor or of a part of it; ``shape`` is that of the whole. Parts add up with ``+``."""

    dtype: str
    shape: tuple[int, ...]
    value: int

    def __add__(self, other: TensorSum) -> TensorSum:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(f"parts of different tensors: {self.dtype} {self.shape}, {other.dtype} {other.shape}")
        return TensorSum(self.dtype, self.shape, (self.value + other.value) & MASK)


def tensor_sums(
    tensors: Mapping[str, Tensor],
    *,
    offsets: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, TensorSum]:
    """Hashes of named tensors; one transfer for all that live on a device.

    A shard must be a contiguous run of the whole's row-major order (a split along dim 0): give its first logical
    index in ``offsets`` and the whole's shape in ``shapes``.
    """
    values: dict[str, int] = {}
    on_device: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        words, per_element = _words(tensor)
        start = (offsets or {}).get(name, 0) * per_element
        if isinstance(words, np.ndarray):
            values[name] = _sum_numpy(words, start)
        else:
            on_device[name] = _sum_torch(words, start)
    if on_device:
        import torch

        devices = {t.device for t in on_device.values()}
        for device in devices:
            names = [name for name, t in on_device.items() if t.device == device]
            sums = torch.stack([on_device[name] for name in names]).tolist()
            values.update({name: value & MASK for name, value in zip(names, sums, strict=True)})
    return {
        name: TensorSum(
            str(tensor.dtype).removeprefix("torch."),
            tuple((shapes or {}).get(name, tuple(tensor.shape))),
            values[name],
        )
        for name, tensor in tensors.items()
    }


def add_sums(parts: Iterable[Mapping[str, TensorSum]]) -> dict[str, TensorSum]:
    """Adds the ranks' hashes, name by name."""
    total: dict[str, TensorSum] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def combine(sums: Mapping[str, TensorSum]) -> str:
    """16 hex digits for a named collection, whatever its order; name, dtype and shape count, so swaps are seen."""
    total = 0
    for name, s in sums.items():
        text = f"{name}\0{s.dtype}\0{s.shape}\0{s.value}"
        total += int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return f"{total & MASK:016x}"


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits for a named collection of whole tensors."""
    return combine(tensor_sums(tensors))


def row_sums(rows: Sequence[np.ndarray]) -> np.ndarray:
    """``element_sum`` of every row, int64 [n] (the same 64 bits)."""
    lengths = np.array([row.size for row in rows], np.int64)
    if len(rows) and lengths.max() * max(1, rows[0].dtype.itemsize // 4) <= BLOCK and lengths.mean() < 512:
        return _short_row_sums(rows, lengths)  # many short rows: one pass over all is faster than a call for each
    return np.array([element_sum(row) for row in rows], np.uint64).view(np.int64)


def column_sum(rows: Sequence[np.ndarray], indexes: Sequence[int], sums: np.ndarray | None = None) -> TensorSum:
    """The hash of one column of samples (or groups): ``rows[j]`` is the array of sample ``indexes[j]``.

    Every row enters with its index, its length and its elements, so that disjoint parts of a column add up, in any
    order. ``shape`` is empty: rows may differ in length. ``sums``: their ``row_sums``, where those are known.
    """
    if len(rows) != len(indexes):
        raise ValueError(f"{len(rows)} rows, {len(indexes)} indexes")
    if not rows:
        return TensorSum("", (), 0)
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1:
        raise ValueError(f"a column has one dtype, not {sorted(map(str, dtypes))}")
    lengths = np.array([row.size for row in rows], np.int64)
    values = (row_sums(rows) if sums is None else sums) + lengths * np.uint64(_LENGTH_MULTIPLIER).view(np.int64)
    counters = np.asarray(indexes, np.uint64) + np.uint64(_ROW_COUNTER)
    multipliers = (_splitmix64(counters) | np.uint64(1)).view(np.int64)
    return TensorSum(str(rows[0].dtype), (), int(np.einsum("i,i->", values, multipliers)) & MASK)


def _short_row_sums(rows: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """``row_sums`` in one pass; rows of at most BLOCK words."""
    words, per_element = _words(np.concatenate([row.reshape(-1) for row in rows]))
    counts = lengths * per_element
    starts = np.cumsum(counts) - counts
    position = np.arange(len(words)) - np.repeat(starts, counts)
    running = np.concatenate([[0], np.cumsum(words * _u()[position])])  # wraps; differences are right all the same
    return (running[starts + counts] - running[starts]) * _v(0)[0]


def fingerprint_record(record: Any) -> str:
    """16 hex digits for plain data: numbers, strings, lists, tuples, dicts and dataclasses (a schedule, a config)."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), default=_fields)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _fields(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not plain data")
