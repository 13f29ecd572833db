"""Seeds of initial weights and of dropout."""

import hashlib


def seed_for(seed: int, *names: object) -> int:
    """A seed for one named part of a run, the same on every rank and machine."""
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
