"""The live view of an experiment that other processes measure: a picture on a terminal, otherwise lines."""

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from benchctl.cli.streams import drawing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO, TypeAlias

    from benchctl.cluster.progress import Progress
    from benchctl.records.directory import ResultDirectory

    Show: TypeAlias = Callable[[Progress], None]

TICK_S: Final = 0.5
"""Seconds between two calls of a caller's functions."""
LOOK_S: Final = 2.0
"""Seconds between two looks at the files."""
_LEAST_WIDTH: Final = 40
_LEAST_HEIGHT: Final = 8


def show_until_done(
    results: "ResultDirectory",
    *,
    should_stop: "Callable[[], bool]",
    on_tick: "Callable[[Progress], None]",
    is_quiet: bool,
    width: int | None = None,
) -> "Progress":
    """Show the progress of ``results`` on stderr until ``should_stop()`` is true; returns the last one.

    Both functions are called about twice a second; ``on_tick`` gets the latest progress. That every run has ended
    does not end the view: only the caller knows whether failed blocks are measured again. ``width`` is the number
    of blocks that can be measured at a time, as far as the caller knows it. With ``is_quiet``, or without a
    terminal, there is one line for each change. A KeyboardInterrupt passes through.
    """
    from benchctl.cluster.watcher import Watcher

    watcher = Watcher(results, width)
    with progress_view(is_quiet=is_quiet) as show:
        progress, looked_s = watcher.look(), time.monotonic()
        while True:
            show(progress)
            on_tick(progress)
            if should_stop():
                progress = watcher.look()
                show(progress)
                return progress
            time.sleep(TICK_S)
            if time.monotonic() - looked_s >= LOOK_S:
                progress, looked_s = watcher.look(), time.monotonic()


@contextmanager
def progress_view(stream: "TextIO | None" = None, *, is_quiet: bool = False) -> "Iterator[Show]":
    """Yield the function that shows a progress on ``stream``, by default stderr: drawn over the last one where that
    is a terminal with a width, otherwise as lines of what is new.
    """
    stream = sys.stderr if stream is None else stream
    if is_quiet or not _can_draw(stream):
        yield ChangesInLines(stream).show
        return
    from rich.live import Live

    from benchctl.cli.cluster.progress_text import picture
    from benchctl.cli.output.console import TextConsole

    console = TextConsole(file=drawing(stream), force_terminal=True)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def show(progress: "Progress") -> None:
            width = max(console.width - 1, _LEAST_WIDTH)  # some terminals break a full line
            live.update(picture(progress, width, max(console.height - 1, _LEAST_HEIGHT)), refresh=True)

        yield show


def _can_draw(stream: "TextIO") -> bool:
    """True for a terminal with a width whose cursor can be moved."""
    if not stream.isatty() or os.environ.get("TERM", "").lower() in {"", "dumb", "unknown"}:
        return False
    return os.get_terminal_size(stream.fileno()).columns > 0


class ChangesInLines:
    """Prints a line for each change of the totals, and one for each new problem."""

    def __init__(self, stream: "TextIO") -> None:
        self._stream = stream
        self._counts: object = None
        self._problems: set[str] = set()

    def show(self, progress: "Progress") -> None:
        """Print what is new since the last call."""
        from benchctl.cli.cluster.progress_text import problem_lines, summary_line

        lines = [line for line in problem_lines(progress.problems) if line not in self._problems]
        self._problems.update(lines)
        if (counts := counts_of(progress)) != self._counts:
            self._counts = counts
            lines.append(summary_line(progress))
        for line in lines:
            print(line, file=self._stream, flush=True)


def counts_of(progress: "Progress") -> object:
    """Value that is another one after each change that a line or a document is worth."""
    states = [(block.state, block.num_ended, block.generation) for block in progress.blocks]
    return progress.state, states, progress.problems
