"""Verdicts as signs: every verdict has a word, a shape and a colour, so that none depends on the colour alone."""

from typing import Final

from benchctl.report.page.html import Html, el, join

_SHAPES: Final = {
    "regression": "M8 1.2 15.2 14.2H.8Z",
    "improvement": "M8 .8a7.2 7.2 0 1 0 0 14.4A7.2 7.2 0 1 0 8 .8Z",
    "equivalent": "M1.8 1.8h12.4v12.4H1.8Z",
    "inconclusive": "M8 .4 15.6 8 8 15.6.4 8Z",
    "invalid": "M5 .8h6L15.2 5v6L11 15.2H5L.8 11V5Z",
}
_SIGNS: Final = {
    "regression": "M8 5.4v4.4M8 11.6v.6",
    "improvement": "M4.8 8.2l2.3 2.3 4.2-4.6",
    "equivalent": "M4.8 6.3h6.4M4.8 9.7h6.4",
    "inconclusive": "M4.9 8h.01M8 8h.01M11.1 8h.01",
    "invalid": "M5.6 5.6l4.8 4.8M10.4 5.6l-4.8 4.8",
}
KINDS: Final = {
    "equal": "equivalent",
    "different": "invalid",
    "changed": "inconclusive",
    "unknown": "inconclusive",
    "not-comparable": "invalid",
    "damaged": "invalid",
    "nothing to compare": "inconclusive",
    "unfinished": "inconclusive",
}
"""What other words look like."""


def kind_of(verdict: str) -> str:
    """The verdict whose colour and shape a word has."""
    kind = KINDS.get(verdict, verdict)
    return kind if kind in _SHAPES else "inconclusive"


def icon(verdict: str, size_px: int = 16) -> Html:
    """The shape of a verdict with its sign in it, in the colour of its class."""
    kind = kind_of(verdict)
    return el(
        "svg",
        el("path", d=_SHAPES[kind], class_="shape"),
        el("path", d=_SIGNS[kind], class_="sign"),
        class_=f"icon is-{kind}",
        viewBox="0 0 16 16",
        width=size_px,
        height=size_px,
        aria_hidden="true",
    )


def badge(verdict: str) -> Html:
    """A verdict as shape and word."""
    return el("span", icon(verdict), el("span", verdict), class_=f"badge is-{kind_of(verdict)}")


def marker(verdict: str, x: str, y: str) -> Html:
    """The shape alone, centred on a point of a drawing; ``x`` and ``y`` are SVG lengths such as ``41%``."""
    kind = kind_of(verdict)
    shape = el("path", d=_SHAPES[kind], transform="translate(-6 -6) scale(.75)")
    return el("svg", shape, x=x, y=y, class_=f"marker is-{kind}", overflow="visible")


def legend() -> Html:
    """All shapes with their words."""
    return join(el("span", icon(kind, 13), kind, class_="key") for kind in _SHAPES)
