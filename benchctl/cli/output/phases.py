"""Progress of work of unknown length: one line that changes, or now and then a line where there is no terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from benchctl.cli.output.progress import has_room_for_bars
from benchctl.cli.streams import drawing

_LINE_INTERVAL_S: Final = 15.0
"""Between lines where no terminal shows one that changes."""


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """``announce`` prints a line of the result on stdout, ``show`` tells on stderr what is being done."""

    announce: Callable[[str], None]
    show: Callable[[str], None]


@contextmanager
def phase_progress(name: str, *, is_quiet: bool) -> Iterator[PhaseProgress]:
    """Yield what shows the progress of ``name``; with ``is_quiet`` only what is announced."""
    from tqdm import tqdm

    is_drawn = has_room_for_bars() and not is_quiet
    bar = tqdm(
        bar_format="{desc} {elapsed}{postfix}",
        desc=name,
        disable=not is_drawn,
        dynamic_ncols=True,
        file=drawing(sys.stderr),
        leave=False,
    )
    lines = _Lines(name)

    def announce(line: str) -> None:
        bar.clear()
        print(line, flush=True)

    def show(phase: str) -> None:
        if is_drawn:
            bar.set_postfix_str(phase)
        elif not is_quiet:
            lines.show(phase)

    with bar:
        yield PhaseProgress(announce, show)


class _Lines:
    """Lines for a log: what is being done and for how long, at most four a minute."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began_s = self._shown_s = time.monotonic()

    def show(self, phase: str) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < _LINE_INTERVAL_S:
            return
        self._shown_s = now_s
        minutes, seconds = divmod(int(now_s - self._began_s), 60)
        print(f"{self._name} {minutes:02}:{seconds:02}, {phase}", file=sys.stderr, flush=True)
