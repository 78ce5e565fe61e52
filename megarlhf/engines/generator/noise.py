"""Sampling noise that depends on what is sampled, never on where: a hash of (seed, step, row, sample, position, token).

Gumbel noise g added to logits / temperature makes the arg max a sample of the softmax (Gumbel 1954; Maddison et al.
2014, "A* sampling"). Here g comes from a counter-based hash in wrapping integer arithmetic, so that every device,
layout, batch order and batch size draws the same:

- A row's 64-bit key folds seed, step, row and sample, one after the other: key = mix(key + (field + 1) * golden), where
  mix is the finaliser of splitmix64 (Steele et al. 2014). A token position's key is one more fold.
- The key's halves k0, k1 and a vocabulary id v give 32 bits: x = (v * 0x9E3779B1) ^ k0, then xor-shift 16, multiply,
  add k1, xor-shift 15, multiply, xor-shift 16 (the multipliers of Wellons' lowbias32). k1 enters between the rounds, so
  that two keys whose k0 are close do not draw permutations of the same numbers.
- u = (x + 0.5) / 2^32, E = -log1p(-u) is exponential, g = -log E. Small u, which make the large g that win, keep their
  full resolution in float32; u is capped at 1 - 2^-24, whose g of -2.8 never matters.
"""

import torch

_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_MIX_A, _MIX_B = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_GOLDEN_32 = 0x9E3779B1 - 2**32
_ROUND_A, _ROUND_B = 0x7FEB352D, 0x846CA68B - 2**32


def row_keys(seed: int, step: int, row_ids: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Keys [B] int64 of the responses with dataset rows `row_ids` [B] and sample numbers `samples` [B] (int64)."""
    key = torch.zeros_like(row_ids)
    for field in (torch.full_like(key, seed), torch.full_like(key, step), row_ids, samples):
        key = _fold(key, field)
    return key


def gumbel(keys: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [B, M] float32 for vocabulary ids [M] or [B, M] at token positions [B] of rows with `keys` [B]."""
    return exponential(hashed(*position_keys(keys, positions), spread(ids))).log_().neg_()


def position_keys(keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For token positions [B] of rows with `keys` [B]: k0 after its xor-shift and k1, both [B, 1] int32."""
    key = _fold(keys, positions)
    return _first_shift(_to_int32(key))[:, None], _to_int32(key >> 32)[:, None]


def spread(ids: torch.Tensor) -> torch.Tensor:
    """What vocabulary ids bring to the hash, int32 of their shape, after the first xor-shift.

    A xor-shift of a ^ b is that of a ^ that of b, so the first one is not made again for every row.
    """
    return _first_shift(ids.to(torch.int32) * _GOLDEN_32)


def hashed(low: torch.Tensor, high: torch.Tensor, spread_ids: torch.Tensor) -> torch.Tensor:
    """The 32 bits x [B, M] (int32, to be read as unsigned) of `position_keys` [B, 1] and `spread` [M] or [B, M]."""
    # int32 arithmetic wraps; its right shift copies the sign bit, hence the masks
    bits = spread_ids ^ low
    bits *= _ROUND_A
    bits += high
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _ROUND_B
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def unsigned(bits: torch.Tensor) -> torch.Tensor:
    """float32 of bits that are read as unsigned numbers: 2^32 * u, but for the half that is not added yet."""
    return torch.empty(bits.shape, dtype=torch.float32, device=bits.device).copy_(bits.view(torch.uint32))


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """E of the bits: the arg max of p / E is that of log p + g, at the price of one logarithm less."""
    return unsigned(bits).add_(0.5).mul_(-(2.0**-32)).clamp_(min=-1 + 2.0**-24).log1p_().neg_()


def _first_shift(x: torch.Tensor) -> torch.Tensor:
    return x ^ ((x >> 16) & 0xFFFF)


def _fold(key: torch.Tensor, field: torch.Tensor) -> torch.Tensor:
    x = key + (field + 1) * _GOLDEN_64
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_B
    return x ^ ((x >> 31) & (2**33 - 1))


def _to_int32(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits, as a signed number: a plain cast of a larger value is not defined everywhere."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)
