"""Seeds for everything random."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """An independent seed for every different sequence of parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
