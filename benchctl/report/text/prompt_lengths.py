"""Lengths of the prompts of a request set in words, with who counted them."""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from benchctl.formats import four_digits
from benchctl.records.request import ESTIMATE, SERVER, PreparedRequest

_SHOWN_HEX: Final = 8
"""Digits of a tokenizer's SHA-256 that are shown: enough to tell tokenizers apart."""


def prompt_lengths_text(requests: Sequence[PreparedRequest], engine: str) -> str | None:
    """``256 tokens each, counted by tokenizer 3f2a91c0``; None for a set without requests."""
    if not requests:
        return None
    lengths = [request.prompt_tokens for request in requests]
    low, high = min(lengths), max(lengths)
    tokens = f"{low} tokens each" if low == high else f"{low} to {high} tokens (mean {four_digits(fmean(lengths))})"
    sources = dict.fromkeys(counted_by(request.prompt_tokens_from, engine) for request in requests)
    return f"{tokens}, {' or '.join(sources)}"


def counted_by(source: str, engine: str) -> str:
    """The source of counts in words. The simulator counts by the rule of the estimate, which is exact for it."""
    if source == SERVER:
        return "counted by the server"
    if source == ESTIMATE:
        return "counted as the simulator counts" if engine == "sim" else "estimated"
    kind, _, digest = source.partition(" ")
    return f"counted by {kind} {digest[:_SHOWN_HEX]}"
