"""Shapes of verdicts: every verdict has a word, a shape and a colour, so that none depends on the colour alone."""

from typing import Final

SHAPES: Final = {
    "regression": "M8 1.2 15.2 14.2H.8Z",
    "improvement": "M8 .8a7.2 7.2 0 1 0 0 14.4A7.2 7.2 0 1 0 8 .8Z",
    "equivalent": "M1.8 1.8h12.4v12.4H1.8Z",
    "inconclusive": "M8 .4 15.6 8 8 15.6.4 8Z",
    "invalid": "M5 .8h6L15.2 5v6L11 15.2H5L.8 11V5Z",
}
"""Outlines as SVG paths in a square of 16."""
SIGNS: Final = {
    "regression": "M8 5.4v4.4M8 11.6v.6",
    "improvement": "M4.8 8.2l2.3 2.3 4.2-4.6",
    "equivalent": "M4.8 6.3h6.4M4.8 9.7h6.4",
    "inconclusive": "M4.9 8h.01M8 8h.01M11.1 8h.01",
    "invalid": "M5.6 5.6l4.8 4.8M10.4 5.6l-4.8 4.8",
}
"""The signs inside the outlines."""
_KINDS: Final = {
    "equal": "equivalent",
    "decided": "equivalent",
    "different": "invalid",
    "changed": "inconclusive",
    "unknown": "inconclusive",
    "not-comparable": "invalid",
    "damaged": "invalid",
    "nothing to compare": "inconclusive",
    "unfinished": "inconclusive",
}


def kind_of(word: str) -> str:
    """The verdict whose colour and shape a word has; inconclusive for words without one of their own."""
    kind = _KINDS.get(word, word)
    return kind if kind in SHAPES else "inconclusive"


def svg_length(share: float) -> str:
    """A share of the width as an SVG length in per cent."""
    return f"{share * 100:.3f}%"
