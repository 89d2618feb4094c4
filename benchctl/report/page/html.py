"""HTML that cannot be broken by what it shows: elements as calls, and every text in them escaped.

Whatever is a plain ``str`` is text, wherever it comes from; only what these functions return (``Html``) is markup.
There is no way in between, so that a log line with ``</script>`` is seen on the page as that.
"""

import json
from collections.abc import Iterable
from html import escape
from typing import Any, Final, TypeAlias

_VOID: Final = frozenset({"br", "col", "input", "link", "meta"})


class Html(str):
    """Markup that is already safe."""

    __slots__ = ()


Part: TypeAlias = "str | Html | Iterable[str | Html] | None"
"""Text, markup, several of them, or nothing."""


def el(tag: str, *parts: Part, **attributes: str | float | bool | None) -> Html:
    """One element. ``class_`` is ``class``, ``data_key`` is ``data-key``; True is a bare attribute, False and None
    none at all.
    """
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    said = "".join(
        f" {name}" if value is True else f' {name}="{escape(str(value))}"'
        for name, value in names.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Html(f"<{tag}{said}>")
    return Html(f"<{tag}{said}>{join(*parts)}</{tag}>")


def join(*parts: Part) -> Html:
    """Parts one after the other."""
    return Html("".join(map(_text, parts)))


def _text(part: Part) -> str:
    if part is None:
        return ""
    if isinstance(part, Html):
        return part
    if isinstance(part, str):
        return escape(part, quote=False)
    return "".join(map(_text, part))


def lines(parts: Iterable[str | Html]) -> list[Html]:
    """List items."""
    return [el("li", part) for part in parts]


def embedded_json(identifier: str, document: Any) -> Html:
    """A JSON document inside the page, which scripts and people can read out again.

    Nothing in it can end its element: every ``<`` is written as an escape of JSON, which means the same.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    inert = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return Html(f'<script type="application/json" id="{escape(identifier)}">{inert}</script>')


def script(code: str) -> Html:
    """Code of our own inside the page. Raises ValueError for code that would end its element."""
    return Html(f"<script>{_closed(code, 'script')}</script>")


def dormant_script(identifier: str, code: str) -> Html:
    """Code that is not run, nor even parsed, before another script asks for it."""
    return Html(f'<script type="text/plain" id="{escape(identifier)}">{_closed(code, "script")}</script>')


def style(rules: str) -> Html:
    """Style rules of our own inside the page."""
    return Html(f"<style>{_closed(rules, 'style')}</style>")


def _closed(content: str, tag: str) -> str:
    if f"</{tag}" in content.lower():
        raise ValueError(f"this {tag} holds </{tag} and cannot be put into a page")
    return content
