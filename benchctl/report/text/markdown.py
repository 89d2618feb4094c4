"""Text in Markdown: what comes from outside is shown as it is, on GitHub as well, where comments have mentions.

Nothing in it becomes an element, a link, a picture, a formula, a mention of a person or of an issue.
"""

import re
from typing import Final

from benchctl.untrusted.text import visible_line, visible_lines

_SPECIAL: Final = re.compile(r"[\\|*_`<~&]|\](?=[(\[:])")
"""Signs that begin or end an element, and the bracket that could end the text of a link: intervals have others."""
_ACTIVE: Final = re.compile(r"@|(?<!&)#(?=\d)|(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.IGNORECASE)
"""Behind an ``@``, and in ``#12``, ``://`` and ``www.`` a blank without width keeps GitHub from making a link."""
_NO_WIDTH: Final = "&#8203;"


def markdown_text(text: str) -> str:
    """A text as one line of Markdown that shows it."""
    escaped = _SPECIAL.sub(r"\\\g<0>", visible_line(text)).replace("$", "&#36;")
    return _ACTIVE.sub(rf"\g<0>{_NO_WIDTH}", escaped)


def fenced(text: str) -> str:
    """A text of several lines as a block of code, between more backticks than it has in a row."""
    escaped = visible_lines(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", escaped)), default=0))
    return f"{fence}text\n{escaped}\n{fence}"
