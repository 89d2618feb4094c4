"""Named random streams: each use of chance has its own, so that one cannot disturb another."""

import random


def named_stream(seed: int, name: str) -> random.Random:
    """The stream ``name`` of a profile's seed, the same on every machine."""
    return random.Random(f"{seed}:{name}")  # noqa: S311  # repeatable on purpose; nothing here is a secret
