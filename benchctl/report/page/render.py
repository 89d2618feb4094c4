"""Plain values to HTML by the templates in ``templates/``: every text is escaped, whatever it looks like.

A log line with ``</script>`` or ``{{ }}`` appears on the page as just that; only ``inert_json`` and ``closed``
return markup.
"""

import base64
import gzip
import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from benchctl.formats import capitalized, minus, minus_in_numbers, percentage
from benchctl.report.page.parts.shapes import SHAPES, SIGNS, kind_of
from benchctl.untrusted.text import visible, visible_lines


def render_page(values: dict[str, Any]) -> str:
    """The page as HTML; the same values give the same bytes. Raises jinja2.UndefinedError for a missing value."""
    return _environment().get_template("page.html").render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("benchctl.report.page"),
        autoescape=True,
        finalize=_visible_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "capitalized": capitalized,
        "kind": kind_of,
        "minus": minus,
        "minus_in_numbers": minus_in_numbers,
        "percentage": percentage,
        "whole": whole,
    }
    environment.globals |= {"shapes": SHAPES, "signs": SIGNS}
    return environment


def _visible_value(value: Any) -> Any:
    """A value on its way into the page: of a text, what can be seen; markup stays as it is."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def whole(text: str) -> Markup:
    """A text of many lines, such as a log, of which only lines that are too long are cut."""
    return escape(visible_lines(text))


def inert_json(document: Any) -> Markup:
    """A JSON document for a ``<script>`` element, which scripts and people can read out again.

    Nothing in it can end its element: every ``<`` is written as an escape of JSON, which means the same.
    """
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - nothing in it can end its element


def closed(code: str, tag: str) -> Markup:
    """Our own rules or script as the content of a ``tag`` element. Raises ValueError for code that ends it."""
    if f"</{tag}" in code.lower():
        raise ValueError(f"this {tag} holds </{tag} and cannot be put into a page")
    return Markup(code)  # noqa: S704 - code of our own that cannot end its element


def resource(name: str) -> str:
    """A text file of this package."""
    return (files("benchctl.report.page") / name).read_text(encoding="utf-8")


@cache
def plotly() -> str:
    """plotly.js as it is run."""
    return resource("vendor/plotly-basic.min.js")


@cache
def packed_plotly() -> Markup:
    """plotly.js, compressed by gzip and written in base64: 0.5 MB instead of 1.2; the page unpacks it."""
    code = base64.b64encode(gzip.compress(plotly().encode(), mtime=0)).decode()
    return Markup(code)  # noqa: S704 - base64 has no markup
