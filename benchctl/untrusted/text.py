"""Text from outside, such as a model's name, an error body or a line of a log, on its way to a reader.

Records keep the raw text. What shows it (terminal, Markdown, HTML, CSV) passes it through ``visible`` first.
"""

import re
from contextlib import suppress
from typing import Final

from benchctl.untrusted import MESSAGE_CHARS, VALUE_CHARS

_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""C0 and C1 controls but tab and line feed, marks that reorder or hide text, and lone surrogates. The joiners of
Persian and of emoji stay."""
_FORMULA: Final = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")
"""The beginnings of formulas, also in full width; after blanks, tabs and line ends as well."""


def visible(text: str, max_chars: int = MESSAGE_CHARS) -> str:
    r"""``text`` with its control characters as escapes such as ``\x1b``, cut to ``max_chars``.

    Tabs and line feeds stay, and the line ends of HTTP and Windows become line feeds. Plain text is returned
    unchanged.
    """
    beginning = escaped(text[: max_chars + 1].replace("\r\n", "\n"))
    return beginning if len(beginning) <= max_chars else f"{beginning[: max_chars - 1]}…"


def visible_line(text: str, max_chars: int = MESSAGE_CHARS) -> str:
    """``visible`` text on one line: line feeds and tabs are escapes, too."""
    beginning = text[: max_chars + 1].replace("\r\n", "\n")
    return visible(beginning.replace("\n", "\\n").replace("\t", "\\t"), max_chars)


def visible_lines(text: str, max_chars: int = MESSAGE_CHARS) -> str:
    """A text whose lines are each ``visible`` and cut to ``max_chars``."""
    return "\n".join(visible(line, max_chars) for line in text.replace("\r\n", "\n").split("\n"))


def csv_cell(value: object) -> object:
    """A value for a cell of CSV: of a text, one that a spreadsheet shows and does not compute.

    A text that begins as a formula does gets an apostrophe in front, unless it is a number.
    """
    if not isinstance(value, str):
        return value
    text = visible(value)
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.lstrip()[:1] in _FORMULA else text


def escaped(text: str) -> str:
    """The whole of a text, with escapes as those of ``visible``."""
    return _CONTROL.sub(_escape, text)


def visible_value(value: object) -> str:
    """A value of a file as a message shows it: its beginning, on one line."""
    return visible_line(repr(value), VALUE_CHARS)


def _escape(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"\\x{number:02x}" if number <= 0xFF else f"\\u{number:04x}"
