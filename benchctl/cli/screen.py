"""The console on which tables and sentences are printed as they are: their text is text, never markup or
control.

Output that several commands share, and the garbage collector while they read.
Progress of an experiment on the terminal: bars with the time left, or one line per run without a terminal.
Progress of work of unknown length: one line that changes, or now and then a line where there is no terminal.
Progress of bytes that are written or received: a bar on a terminal, nothing elsewhere.
Pictures that the user asked for: the check that they can be drawn, before any work.
"""

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from benchctl.cli.failures import drawing, width_of
from benchctl.errors import UsageError
from benchctl.records.files import encodable
from benchctl.units import folded
from benchctl.untrusted.text import visible_line, visible_lines

if TYPE_CHECKING:
    from tqdm import tqdm


class TextConsole(Console):
    """A console that folds a text and interprets nothing in it. A line too long for a message is cut."""

    def render_str(self, text: str, **options: Any) -> Text:
        as_it_is = {"emoji": False, "markup": False, "highlight": False, "highlighter": None}
        return super().render_str(folded(visible_lines(text), self.width), **(options | as_it_is))


_NOT_PLAIN: Final = re.compile(r"[^\n -~]+")
_FIRST_WORD: Final = re.compile(r"\s*(\w+)")
_VERDICT_COLOURS: Final = {
    "regression": "red",
    "invalid": "red",
    "improvement": "green",
    "equivalent": "green",
    "inconclusive": "yellow",
}


def text_console() -> TextConsole:
    """A console on stdout whose tables and sentences are no wider than the terminal, or 120 characters."""
    return TextConsole(soft_wrap=True, width=width_of(sys.stdout))


def say(text: str) -> None:
    """Print a sentence, folded to the width of the output."""
    print(folded(text, width_of(sys.stdout)), flush=True)


def say_verdict(text: str, style: str = "") -> None:
    """Print a sentence that begins with a verdict, folded, with that word in its colour."""
    console = text_console()
    console.print(verdict_text(folded(text, console.width), style))


def verdict_text(text: str, style: str = "") -> Text:
    """A text whose first word is in the colour of the verdict that it names, where the terminal has colours.

    Without a terminal, or with NO_COLOR, the same text is printed plain.
    """
    drawn = Text(text := visible_lines(text), style=style)
    if (word := _FIRST_WORD.match(text)) and (colour := _VERDICT_COLOURS.get(word[1])):
        drawn.stylize(colour, *word.span(1))
    return drawn


def json_text(document: object, indent: int = -1) -> str:
    """A document as JSON in ASCII, which every stream can hold and which has no control characters."""
    text = msgspec.json.format(msgspec.json.encode(encodable(document)), indent=indent).decode()
    return _NOT_PLAIN.sub(lambda match: json.dumps(match.group())[1:-1], text)


def print_json(document: object) -> None:
    """Print a document as JSON with a line for each value."""
    print(json_text(document, indent=1))


def tell(document: object, *parts: RenderableType, as_json: bool) -> None:
    """Print one JSON document, or in its place tables and lines."""
    if as_json:
        print_json(document)
        return
    console = text_console()
    for part in parts:
        console.print(part)


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off inside, or in the function that this decorates.

    Commands that only read create many records, none of which is part of a cycle: to search them takes time and
    frees nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def has_room_for_bars(*, is_quiet: bool = False) -> bool:
    """False with ``is_quiet``, in CI, and where no terminal with a width shows them: programs open some without."""
    has_room = sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return has_room and not is_quiet and not os.environ.get("CI")


def bar(*, is_quiet: bool = False, **options: Any) -> "tqdm[Any]":
    """A bar on stderr, where it has room; ``options`` are those of tqdm."""
    from tqdm import tqdm  # what shows no bar, such as 'benchctl load' of a program, does without it

    is_hidden = not has_room_for_bars(is_quiet=is_quiet)
    return tqdm(disable=is_hidden, dynamic_ncols=True, file=drawing(sys.stderr), **options)


@contextmanager
def live_line(position: int, *, is_quiet: bool = False) -> Iterator[Callable[[Sequence[str]], None]]:
    """Yield the function that shows as many numbers as the width has room for, on a line below the bars of a load;
    none clear the line.
    """
    with bar(is_quiet=is_quiet, total=0, bar_format="{desc}", position=position, leave=False) as line:
        yield lambda parts: line.set_description_str(visible_line(fitting(parts, width_of(sys.stderr) - 1)))


def fitting(parts: Sequence[str], width: int) -> str:
    """The first of ``parts`` that fit into ``width`` characters together, none of them cut."""
    texts = ("; ".join(parts[:number]) for number in range(len(parts), 0, -1))
    return next((text for text in texts if len(text) <= width), "")


@contextmanager
def bytes_progress(name: str, total_bytes: int | None) -> Iterator[Callable[[int], object]]:
    """Yield the function that is told how many more bytes are done; ``total_bytes`` None is not known."""
    with bar(
        desc=visible_line(name), total=total_bytes, unit="B", unit_scale=True, delay=1.0, leave=False
    ) as progress:
        yield progress.update


PICTURE_SUFFIXES: Final = (".png", ".svg", ".pdf")


def drawable(path: Path | None) -> Path | None:
    """The path of a picture. Raises UsageError for one of a kind that cannot be drawn."""
    if path is not None and path.suffix not in PICTURE_SUFFIXES:
        raise UsageError(f"{path}: name a picture that ends in {', '.join(PICTURE_SUFFIXES)}")
    return path


def warn(message: str) -> None:
    """Print a warning on stderr."""
    note(f"warning: {visible_lines(message)}")


def note(text: str) -> None:
    """Print a line on stderr, folded to its width."""
    print(folded(text, width_of(sys.stderr)), file=sys.stderr, flush=True)
