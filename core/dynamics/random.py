"""Random numbers that depend on what they are for, not on which rank draws them or what was drawn before.

Philox 4x32-10 (Salmon et al., SC'11, doi:10.1145/2063384.2063405) turns (seed; id, step, stream) into four 32-bit
words. The words are the same on every device; the normal numbers made of them (Box and Muller) agree to the rounding
of log, sin and cos.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvdd.errors import InputError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four words of 32 random bits for each counter of four such words; int64 tensors of one shape."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # products wrap modulo 2^64, which leaves all 64 bits right
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = ((q >> 32) & _MASK) ^ b ^ k0, q & _MASK, ((p >> 32) & _MASK) ^ d ^ k1, p & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return a, b, c, d


def _pairs(ids: Tensor, step: int, seed: int, stream: int, n_blocks: int) -> tuple[Tensor, Tensor]:
    """(n, n_blocks) of two uniform numbers in (0, 1) each, of 53 bits."""
    if not 0 <= seed < 2**64:
        raise InputError(f"a seed must be a whole number from 0 to 2**64 - 1, got {seed!r}")
    if not (0 <= step < 2**48 and 0 <= stream < 2**16):
        raise InputError(f"random numbers of step {step} and stream {stream}: at most 2**48 steps and 2**16 streams")
    block = torch.arange(n_blocks, dtype=torch.int64, device=ids.device)
    ids = ids.to(torch.int64).unsqueeze(1)
    low = (ids & _MASK).expand(-1, n_blocks)
    high = (((ids >> 32) & 0xFFFF) | ((step >> 32) << 16)).expand(-1, n_blocks)
    counter = (low, torch.full_like(low, step & _MASK), high, (block | (stream << 16)).expand_as(low))
    a, b, c, d = philox(counter, (seed & _MASK, seed >> 32))
    unit = lambda x, y: (((x >> 5) * 67108864 + (y >> 6)).to(torch.float64) + 0.5) * 2.0**-53
    return unit(a, b), unit(c, d)


def uniform(ids: Tensor, step: int, seed: int, stream: int = 0, columns: int = 3) -> Tensor:
    """(n, columns) float64 numbers in (0, 1), for ``ids`` (n,); arguments as for `normal`."""
    first, second = _pairs(ids, step, seed, stream, -(-columns // 2))
    return torch.stack([first, second], 2).flatten(1)[:, :columns]


def normal(ids: Tensor, step: int, seed: int, stream: int = 0, columns: int = 3) -> Tensor:
    """Independent normal numbers, mean 0 and variance 1.

    Args:
        ids: (n,) int64 what each row is for: global ids of atoms, numbers of systems.
        step: of the dynamics.
        seed: of the run.
        stream: keeps numbers of one step apart that serve different ends; each (step, stream, id) is used once.
        columns: numbers for each id.

    Returns:
        (n, columns) float64 on the device of ``ids``.
    """
    first, second = _pairs(ids, step, seed, stream, -(-columns // 2))
    radius, angle = torch.sqrt(-2.0 * torch.log(first)), 2.0 * math.pi * second
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], 2).flatten(1)[:, :columns]
