"""Seeds derived from (run seed, purpose, step, ...): the same on every rank, machine and Python, and independent."""

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for a torch.Generator, from what identifies the stream of random numbers."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
