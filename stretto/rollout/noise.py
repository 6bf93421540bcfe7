"""Sampling noise as a pure function of (run seed, partition, group, sample, position, token id).

There is no generator state to share between samples, so a token does not depend on which other samples are decoded
beside it, on the replica that decodes it, or on what was decoded before. A token is drawn by Gumbel-max:
``argmax(log p + g)`` with g standard Gumbel is a sample of p (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030).

The mixing function is splitmix64's finaliser (Steele et al. 2014, doi:10.1145/2660193.2660195), on int64 that wraps.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >= 1 << 63 else value


_M1, _M2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mix(x: int) -> int:
    """splitmix64's finaliser on a Python integer, unsigned."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    """The same on int64 tensors (logical shifts made of arithmetic ones and a mask); ``x`` is overwritten."""
    x = x.bitwise_xor_((x >> 30) & ((1 << 34) - 1)).mul_(_M1)
    x = x.bitwise_xor_((x >> 27) & ((1 << 37) - 1)).mul_(_M2)
    return x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))


def sample_key(seed: int, partition: int, group: int, sample: int) -> int:
    """64-bit key of one response."""
    key = _mix(seed + _GOLDEN)
    for part in (partition, group, sample):
        key = _mix(key + _GOLDEN * (part + 1))
    return key


def gumbel(keys: list[int], position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise float32 [rows, V] for the token at ``position`` (0-based in the response) of each key.

    -log(E) with E = -log1p(-u), u uniform on multiples of 2**-32: fine near u = 0, where large values come from
    (up to 22.9), so the tail stays exact for vocabularies of any size.
    """
    row = torch.tensor([_signed(_mix(key + _GOLDEN * (position + 1))) for key in keys], device=device)
    token = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    bits = _mix_tensor(row[:, None] + token[None, :])
    u = ((bits >> 32) & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()
