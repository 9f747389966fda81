"""Seeds as pure functions of what they are for, so that a resumed run continues the same streams."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: str | int | None) -> int:
    """A seed in [0, 2**63) from the parts, stable over processes, machines and versions.

    ``derive_seed(run_seed, stage_key, problem_id, sample_index)`` seeds one completion: two problems, two samples, two
    steps or two run seeds never share a stream, and how often something was called before does not matter.
    """
    text = "\x1f".join("" if part is None else f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def content_id(*parts: str | int, digits: int = 24) -> str:
    """A hexadecimal id of the parts (24 digits = 96 bits: no clash is expected in 10**12 rows)."""
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=(digits + 1) // 2).hexdigest()[:digits]
