"""``benchctl watch``: the progress of an experiment that other processes measure, from its files.

A picture that is drawn over on a terminal, a line for each change in a log, or a document for each change as JSON.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, TextIO, TypeAlias

import typer
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchctl.cli.failures import INTERRUPTED, drawing, exit_code_of
from benchctl.cli.options import complete_results
from benchctl.cli.screen import TextConsole, json_text, print_json
from benchctl.cluster.progress import STATES, BlockProgress, Problem, Progress, Watcher, progress_document
from benchctl.records.directory import ResultDirectory, open_results
from benchctl.units import count_of, duration, first_of
from benchctl.untrusted.text import visible_line

Show: TypeAlias = Callable[[Progress], None]

_COLOURS: Final = {
    "running": "cyan",
    "lost": "red",
    "failed": "red",
    "suspect": "yellow",
    "interrupted": "yellow",
    "done": "green",
}
_LEAST_PROBLEMS: Final = 4
"""Lines of a small terminal that problems get before further running blocks do."""
_LONGEST: Final = {"node": 18, "devices": 11, "job": 16}
"""Columns of the running blocks that are cut at so many characters."""
_WIDE: Final = 76
"""Columns of a terminal that has room for devices and job."""
_DEVICE_CHARS: Final = 8
_MANY_ARMS: Final = 4
_LEAST_WIDTH: Final = 40
_LEAST_HEIGHT: Final = 8
TICK_S: Final = 0.5
"""Seconds between two calls of a caller's functions."""
LOOK_S: Final = 2.0
"""Seconds between two looks at the files."""


def _row(block: BlockProgress) -> dict[str, str]:
    """A running block in words; a field that is empty is unknown."""
    devices = block.devices[0][:_DEVICE_CHARS] if block.devices else ""
    if len(block.devices) > 1:
        devices += f" +{len(block.devices) - 1}"
    now = "ending" if block.num_ended == block.num_runs else "between two runs" if block.num_ended else "beginning"
    if block.current is not None:
        elapsed = "" if block.current.elapsed_s is None else f" {duration(block.current.elapsed_s)}"
        now = f"{block.current.arm}: {block.current.phase}{elapsed}"
    fields = {
        "block": str(block.block),
        "node": block.node or "",
        "devices": devices,
        "job": block.job or "",
        "runs": f"{block.num_ended}/{block.num_runs}",
        "now": now,
    }
    return {name: visible_line(text) for name, text in fields.items()}


def _running(progress: Progress) -> list[dict[str, str]]:
    return [_row(block) for block in progress.blocks if block.state == "running"]


def _title(progress: Progress) -> str:
    """Profile and state; one whose blocks are handed out, and that nobody measures now, waits for tasks."""
    is_waiting = progress.is_shared and progress.is_idle and not progress.has_ended
    return f"{progress.profile}: {'waiting' if is_waiting else progress.state}"


def _runs(progress: Progress) -> str:
    return f"{sum(block.num_ended for block in progress.blocks)} of {progress.num_runs} runs ended"


def _states(progress: Progress) -> str:
    counts = progress.block_states
    return "blocks: " + ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def _time_left(progress: Progress) -> str:
    """Time left, and what it rests on."""
    left = progress.time_left
    if progress.has_ended:
        return "nothing is left to measure"
    if left is None:
        return "nothing is measured now" if progress.is_idle else "time left unknown until runs have ended"
    text = f"about {duration(left.s)} left"
    if progress.is_shared:
        text += f", {count_of(left.num_at_a_time, 'block')} at a time"
    if left.source == "earlier-experiments":
        text += ", by earlier experiments"
    return f"{text}, once blocks are measured" if progress.is_idle else text


def _summary(progress: Progress) -> str:
    return f"{_states(progress)}; {_runs(progress)}; {_time_left(progress)}"


def _problem_lines(progress: Progress) -> list[str]:
    """One line for each thing that is not well; runs with the same problem share one."""
    groups: dict[tuple[str, str, int | None], list[Problem]] = defaultdict(list)
    for problem in sorted(progress.problems, key=lambda problem: STATES.index(problem.kind)):
        groups[problem.kind, problem.message, problem.block if problem.run_id is None else None].append(problem)
    lines = []
    for (kind, message, block), group in groups.items():
        runs = first_of([problem.run_id or "" for problem in group], 1)
        number = "" if len(group) == 1 else f"{len(group)} runs "
        lines.append(f"{number}{kind}: {runs}: {message}" if block is None else f"block {block} {kind}: {message}")
    return [visible_line(line) for line in lines]


def _all_lines(progress: Progress) -> Iterator[str]:
    """The progress as it is printed once: totals, each running block, and each problem."""
    yield visible_line(_title(progress))
    yield _summary(progress)
    for row in _running(progress):
        where = (f" on {row['node']}" if row["node"] else "") + (f" {row['devices']}" if row["devices"] else "")
        where += f" ({row['job']})" if row["job"] else ""
        ended = row["runs"].replace("/", " of ")
        yield f"block {row['block']} running{where}: {ended} runs ended; {row['now']}"
    yield from _problem_lines(progress)


def picture(progress: Progress, width: int, height: int) -> RenderableType:
    """The progress in at most ``height`` lines of ``width`` columns.

    A bar and totals, the running blocks, what is not well, and a count of all other blocks.
    """
    arms = [
        f"{arm.arm} {duration(arm.run_s)} ({arm.num_ended})"
        for arm in progress.arms
        if arm.num_ended and arm.run_s is not None
    ]
    lines: list[RenderableType] = [
        _line(f"{_title(progress)}, {_runs(progress)}", "bold"),
        _bar(progress, width),
        _line(_states(progress)),
        _line(_time_left(progress)),
        *([_line(f"a run takes: {first_of(arms, _MANY_ARMS)}", "dim")] if arms else []),
    ]
    problems, running = _problem_lines(progress), _running(progress)
    free = height - len(lines) - 1 - (2 if running else 0) - (2 if problems else 0)  # the last line is the rest
    num_problems = min(len(problems), max(_LEAST_PROBLEMS, free - len(running)))
    num_running = min(len(running), max(free - num_problems, 1))
    if running:
        lines += ["", _running_table(running[:num_running], width)]
    if problems:
        lines += ["", _line("Not well", "bold"), *map(_line, problems[:num_problems])]
    left = {"more running block": len(running) - num_running, "more problem": len(problems) - num_problems}
    rest = [f"{count_of(count, noun)} not shown" for noun, count in left.items() if count]
    return Constrain(Group(*lines, _line("; ".join([*rest, str(progress.path)]), "dim")), width)


def _line(text: str, style: str = "") -> Text:
    """A text on one line, with states in their colours where it has no style of its own."""
    line = Text(visible_line(text), style=style, no_wrap=True, overflow="ellipsis")
    for state, colour in _COLOURS.items() if not style else ():
        line.highlight_words([f" {state}"], style=colour)
    return line


def _bar(progress: Progress, width: int) -> Text:
    """Ended runs as ``=``, those of blocks that are measured as ``>``, all others as ``.``"""
    ended = sum(block.num_ended for block in progress.blocks)
    going = sum(block.num_runs - block.num_ended for block in progress.blocks if block.state == "running")
    num_ended = width * ended // max(progress.num_runs, 1)
    num_going = -(-width * (ended + going) // max(progress.num_runs, 1)) - num_ended
    parts = [("=" * num_ended, "green"), (">" * num_going, "cyan"), ("." * (width - num_ended - num_going), "dim")]
    return Text.assemble(*parts, no_wrap=True)


def _running_table(rows: Sequence[dict[str, str]], width: int) -> Table:
    """A column for each field that some block has and that the terminal has room for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", width=width)
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    columns = [name for name in names if width >= _WIDE or name not in {"devices", "job"}]
    for name in columns:
        table.add_column(
            name,
            justify="right" if name == "block" else "left",
            no_wrap=True,
            max_width=_LONGEST.get(name),
            overflow="ellipsis",
            ratio=1 if name == "now" else None,
        )
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


class _Changes:
    """Prints a line for each change: of the totals and for each new problem, or one document of JSON."""

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        self._stream = stream
        self._as_json = as_json
        self._counts: object = None
        self._told: set[str] = set()

    def show(self, progress: Progress) -> None:
        """Print what is new since the last call."""
        states = [(block.state, block.num_ended) for block in progress.blocks]
        if (counts := (progress.state, states, progress.problems)) == self._counts:
            return
        self._counts = counts
        lines = [line for line in _problem_lines(progress) if line not in self._told]
        self._told.update(lines)
        for line in [json_text(progress_document(progress))] if self._as_json else [*lines, _summary(progress)]:
            print(line, file=self._stream, flush=True)


@contextmanager
def _view(stream: TextIO, *, is_quiet: bool = False, as_json: bool = False) -> Iterator[Show]:
    """Yield the function that shows a progress on ``stream``: drawn over the last one where that is a terminal with
    a width and a cursor that can be moved, otherwise as lines of what is new.
    """
    is_dumb = not stream.isatty() or os.environ.get("TERM", "").lower() in {"", "dumb", "unknown"}
    if is_quiet or as_json or is_dumb or os.get_terminal_size(stream.fileno()).columns == 0:
        yield _Changes(stream, as_json=as_json).show
        return
    console = TextConsole(file=drawing(stream), force_terminal=True)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def show(progress: Progress) -> None:
            width = max(console.width - 1, _LEAST_WIDTH)  # some terminals break a full line
            live.update(picture(progress, width, max(console.height - 1, _LEAST_HEIGHT)), refresh=True)

        yield show


def _follow(watcher: Watcher, show: Show, is_over: Callable[[Progress], bool], interval_s: float) -> Progress:
    """Show what each look at the files sees until ``is_over``, which is asked at every tick; returns the last."""
    while True:
        progress, looked_s = watcher.look(), time.monotonic()
        show(progress)
        while not (is_done := is_over(progress)) and time.monotonic() - looked_s < interval_s:
            time.sleep(min(TICK_S, interval_s))
        if is_done:
            progress = watcher.look()
            show(progress)
            return progress


def show_until_done(
    results: ResultDirectory, is_over: Callable[[], bool], *, is_quiet: bool, width: int | None = None
) -> None:
    """Show the progress of ``results`` on stderr until ``is_over``, which is called about twice a second.

    That every run has ended does not end the view: only the caller knows whether failed blocks are measured again.
    ``width`` is the number of blocks that can be measured at a time, as far as the caller knows it. With
    ``is_quiet``, or without a terminal, there is one line for each change. A KeyboardInterrupt passes through.
    """
    with _view(sys.stderr, is_quiet=is_quiet) as show:
        _follow(Watcher(results, width), show, lambda _: is_over(), LOOK_S)


def watch(
    results: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Result directory, begun or not.", autocompletion=complete_results),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the progress as it is now, and end with 0.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: with --once one document, otherwise one per line and change."),
    ] = False,
    interval: Annotated[
        float,
        typer.Option(min=0.2, max=3600.0, metavar="S", help="Seconds between two looks at the files."),
    ] = LOOK_S,
) -> None:
    """Show how far an experiment is: blocks, nodes, time left, and what is not well. It only reads files.

    It ends when every run has: with 0 all are done, 4 a run is suspect, 5 a run failed, as 'benchctl run' does. It
    ends with 130 after Ctrl-C, which does not touch the experiment, and when the one process that measures all of
    it was interrupted.
    """
    watcher = Watcher(open_results(results))
    if once and as_json:
        print_json(progress_document(watcher.look()))
    elif once:
        print("\n".join(_all_lines(watcher.look())))
    else:
        with _view(sys.stdout, as_json=as_json) as show:
            progress = _follow(watcher, show, _is_over, interval)
        states = progress.run_states
        code = exit_code_of(states.get("failed", 0), states.get("suspect", 0))
        raise typer.Exit(code if progress.has_ended else INTERRUPTED)


def _is_over(progress: Progress) -> bool:
    """True when every run has ended, or the one process that measured them is gone: others do not take over."""
    if progress.state == "running":
        return False  # all may have ended, and the last document is being written
    return progress.has_ended or (not progress.is_shared and progress.state == "interrupted")
