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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console, HighlighterType, JustifyMethod, OverflowMethod
from rich.style import Style
from rich.text import Text

from benchctl.cli.streams import drawing, log_line
from benchctl.errors import UsageError
from benchctl.formats import duration
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.untrusted.text import visible_line, visible_lines

if TYPE_CHECKING:
    from rich.table import Table

    from benchctl.analysis.summary.analyzed import AnalyzedExperiment
    from benchctl.measure.experiment import Listener


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


TABLE_WIDTH: Final = 10_000
"""Wide enough that no table is cut: numbers without their last digits would mislead."""
_LEAST_FOLDED: Final = 80
"""Narrower columns could not be read; a narrower terminal breaks the lines by itself."""
_FILE_WIDTH: Final = 200

_NOT_PLAIN: Final = re.compile(r"[^\n -~]+")
_FIRST_WORD: Final = re.compile(r"\s*(\w+)")
_VERDICT_COLOURS: Final = {
    "regression": "red",
    "invalid": "red",
    "improvement": "green",
    "equivalent": "green",
    "inconclusive": "yellow",
}


def wide_console() -> "TextConsole":
    """A console that prints tables and sentences as they are: not cut, wrapped or interpreted as markup."""
    return TextConsole(soft_wrap=True, width=TABLE_WIDTH)


def folding_console(width_of_files: int | None = _FILE_WIDTH) -> "TextConsole":
    """A console whose tables fold their cells to the width of the terminal, but not to one that cannot be read.

    ``width_of_files`` is the width without a terminal; by None as at one.
    """
    console = TextConsole(width=None if width_of_files is None or sys.stdout.isatty() else width_of_files)
    console.width = max(console.width, _LEAST_FOLDED)
    return console


def verdict_text(text: str, style: str = "") -> "Text":
    """A text whose first word is in the colour of the verdict that it names, where the terminal has colours.

    Without a terminal, or with NO_COLOR, the same text is printed plain.
    """
    from rich.text import Text

    drawn = Text(text := visible_lines(text), style=style)
    if (word := _FIRST_WORD.match(text)) and (colour := _VERDICT_COLOURS.get(word[1])):
        drawn.stylize(colour, *word.span(1))
    return drawn


def print_json(document: object) -> None:
    """Print a document as JSON in ASCII, which every stream can hold and which has no control characters."""
    print(_json_text(document, indent=1))


def json_line(document: object) -> str:
    """A document as JSON in ASCII, in one line."""
    return _json_text(document, indent=-1)


def _json_text(document: object, indent: int) -> str:
    import msgspec

    from benchctl.records.files import encodable

    text = msgspec.json.format(msgspec.json.encode(encodable(document)), indent=indent).decode()
    return _NOT_PLAIN.sub(lambda match: json.dumps(match.group())[1:-1], text)


def in_one_row(table: "Table") -> "Table":
    """The same table with its rows as one row of many lines, which rich draws in a fraction of the time.

    Unchanged where that would look different: with cells of several lines, or rows that have a style of their own.
    """
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    if any("\n" in cell for cells in columns for cell in cells) or any(
        r.style or r.end_section for r in table.rows
    ):
        return table
    drawn = copy(table)
    drawn.columns, drawn.rows = [column.copy() for column in table.columns], []
    if table.rows:
        drawn.add_row(*map("\n".join, columns))
    return drawn


def print_notes(console: "TextConsole", analysis: "AnalyzedExperiment") -> None:
    """Print the verdicts on backfill, the findings and the notes of a result directory, each under its title."""
    from benchctl.report.tables.experiment import bonus_notes, footnote_lines

    backfill = [(title, [f"* {sentence}" for sentence in sentences]) for title, sentences in bonus_notes(analysis)]
    findings = [f"* {finding.sentence} [{finding.code}]" for finding in analysis.findings]
    for title, lines in (*backfill, ("What follows", findings), ("Notes", footnote_lines(analysis))):
        if lines:
            console.print()
            console.print(title, style="bold")
            for line in lines:
                console.print(visible_line(line))


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


_REPORT_INTERVAL_S: Final = 10.0
_TAIL_LINES: Final = 8
"""Lines shown of the log of a server that failed; the record keeps more."""


@dataclass(slots=True)
class _Course:
    """Progress of the experiment and start of the current run."""

    num_runs: int
    runs_per_block: int = 1
    started_s: float = field(default_factory=time.monotonic)
    run_id: str = ""
    began_s: float = 0.0
    reported_s: float = 0.0
    num_ended: int = 0

    def begin_run(self, planned: PlannedRun) -> None:
        self.run_id = planned.run_id
        self.began_s = self.reported_s = time.monotonic()

    def waiting(self, line: str) -> str | None:
        """A line on the progress of a starting server; None while the last one is recent."""
        now_s = time.monotonic()
        if now_s - self.reported_s < _REPORT_INTERVAL_S:
            return None
        self.reported_s = now_s
        return f"{self.run_id}: the server has been starting for {now_s - self.began_s:.0f} s: {line}"

    def end_run(self, planned: PlannedRun, record: RunRecord) -> str:
        """Count a run that has ended; returns a line on it, and after the first block the time left."""
        self.num_ended += 1
        duration_s = time.monotonic() - self.began_s
        text = f"[{self.num_ended}/{self.num_runs}] {planned.run_id}: {record.state} in {duration_s:.1f} s"
        if record.failure is not None:
            tail = record.failure.log_tail.splitlines()[-_TAIL_LINES:]
            message = visible_line(f"{record.failure.cause}: {record.failure.message}")
            return "\n".join([f"{text}; {message}", *map(log_line, tail)])
        line = "; ".join([text, *(visible_line(f"{each.code}: {each.message}") for each in record.warnings)])
        return f"{line}\n{left}" if record.clock != "virtual" and (left := self._left()) else line

    def _left(self) -> str | None:
        num_left = self.num_runs - self.num_ended
        if self.num_ended != self.runs_per_block or not num_left:
            return None
        per_run_s = (time.monotonic() - self.started_s) / self.num_ended
        return f"the first block took {per_run_s * self.num_ended:.0f} s: {duration(per_run_s * num_left)} left"


def has_room_for_bars() -> bool:
    """True when stderr is a terminal with a width: bars on one without, as programs open them, would be
    invisible.
    """
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


@contextmanager
def experiment_progress(num_runs: int, runs_per_block: int, *, is_quiet: bool) -> Iterator["Listener"]:
    """Yield the listener that shows progress; with ``is_quiet`` one line per run on stderr and no bars."""
    from tqdm import tqdm

    from benchctl.cli.conduct import look_text
    from benchctl.measure.experiment import Listener

    course = _Course(num_runs=num_runs, runs_per_block=runs_per_block)
    stderr = drawing(sys.stderr)
    hidden = is_quiet or not has_room_for_bars()
    bar = partial(tqdm, disable=hidden, file=stderr)
    with (
        bar(total=num_runs, desc="runs", unit="run", position=0) as runs,
        tqdm(
            total=1, desc="requests", unit="req", disable=hidden, position=1, leave=False, file=stderr
        ) as requests,
    ):

        def started(planned: PlannedRun, num_requests: int) -> None:
            course.begin_run(planned)
            requests.reset(total=num_requests)
            requests.set_description(visible_line(planned.run_id))

        def advanced(num_done: int) -> None:
            requests.set_postfix_str("", refresh=False)
            requests.update(num_done - requests.n)

        def log_changed(line: str) -> None:
            if not hidden:
                requests.set_postfix_str(visible_line(line))
            elif report := course.waiting(line):
                print(report, file=sys.stderr, flush=True)

        def ended(planned: PlannedRun, record: RunRecord) -> None:
            runs.update(1)
            line = course.end_run(planned, record)
            if hidden:
                print(line, file=sys.stderr, flush=True)
            elif record.state != "done":  # the bars show the others
                tqdm.write(visible_lines(line), file=stderr)

        yield Listener(
            on_run_start=started,
            on_request_end=advanced,
            on_run_end=ended,
            on_log_line=log_changed,
            on_look=lambda look, rule: tqdm.write(visible_lines(look_text(look, rule)), file=stderr),
        )


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


@contextmanager
def bytes_progress(name: str, total_bytes: int | None) -> Iterator[Callable[[int], object]]:
    """Yield the function that is told how many more bytes are done; ``total_bytes`` None is not known."""
    from tqdm import tqdm

    with tqdm(
        desc=visible_line(name),
        total=total_bytes,
        unit="B",
        unit_scale=True,
        delay=1.0,
        dynamic_ncols=True,
        disable=not has_room_for_bars(),
        file=drawing(sys.stderr),
        leave=False,
    ) as bar:
        yield bar.update


PICTURE_SUFFIXES: Final = (".png", ".svg", ".pdf")


def drawable(path: Path | None) -> Path | None:
    """The path of a picture. Raises UsageError for one of a kind that cannot be drawn."""
    if path is not None and path.suffix not in PICTURE_SUFFIXES:
        raise UsageError(f"{path}: name a picture that ends in {', '.join(PICTURE_SUFFIXES)}")
    return path
