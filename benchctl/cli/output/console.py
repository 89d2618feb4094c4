"""The console on which tables and sentences are printed as they are: their text is text, never markup or control.

Rich would read ``[red]`` in a label as a colour and ``:x:`` as an emoji, and would pass on control sequences.
"""

from rich.console import Console, HighlighterType, JustifyMethod, OverflowMethod
from rich.style import Style
from rich.text import Text

from benchctl.untrusted.text import visible_lines


class TextConsole(Console):
    """A console that interprets nothing in a text. Each line of it is cut where it is too long for a message."""

    def render_str(
        self,
        text: str,
        *,
        style: str | Style = "",
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        emoji: bool | None = None,
        markup: bool | None = None,
        highlight: bool | None = None,
        highlighter: HighlighterType | None = None,
    ) -> Text:
        del emoji, markup, highlight, highlighter  # all of them interpret
        return super().render_str(
            visible_lines(text),
            style=style,
            justify=justify,
            overflow=overflow,
            emoji=False,
            markup=False,
            highlight=False,
        )
