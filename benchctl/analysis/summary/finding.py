"""A conclusion in words that the numbers support."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A sentence that the data support. ``code`` is stable; ``numbers`` are those of the sentence."""

    code: str
    sentence: str
    numbers: Mapping[str, float]
