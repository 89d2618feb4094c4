"""Progress of an experiment in words and lines: one line for a log, or a picture that fits a terminal.

The live view of an experiment that other processes measure: a picture on a terminal, otherwise lines.
``benchctl watch``: the progress of an experiment that other processes measure, from its files.
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
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchctl.cli.checks import A_RUN_FAILED, A_RUN_IS_SUSPECT
from benchctl.cli.failures import INTERRUPTED, drawing
from benchctl.cli.options.options import complete_results
from benchctl.cli.screen import TextConsole, json_line, print_json
from benchctl.cluster.block_progress import STATES, BlockProgress
from benchctl.cluster.progress import Problem, Progress, progress_document
from benchctl.cluster.watcher import Watcher
from benchctl.formats import count_of, duration, first_of, shortened
from benchctl.records.directory import ResultDirectory, open_results
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
_MANY_SECONDS: Final = 600


def summary_line(progress: Progress) -> str:
    """Blocks by state, ended runs and time left, in one line."""
    return f"blocks: {_states(progress)}; {_runs(progress)}; {time_left_text(progress)}"


def _states(progress: Progress) -> str:
    counts = progress.block_states
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def _runs(progress: Progress) -> str:
    return f"{sum(block.num_ended for block in progress.blocks)} of {progress.num_runs} runs ended"


def state_text(progress: Progress) -> str:
    """The state in a word; of a shared directory whose blocks nobody measures now, tasks may still be queued."""
    if progress.is_shared and progress.is_idle and not progress.has_ended:
        return "waiting"
    return progress.state


def time_left_text(progress: Progress) -> str:
    """Time left with its range, and what it rests on."""
    if progress.has_ended:
        return "nothing is left to measure"
    left = progress.time_left
    if left is None:
        return "nothing is measured now" if progress.is_idle else "time left unknown until runs have ended"
    low, high = duration(left.low_s), duration(left.high_s)
    text = f"about {duration(left.s)} left" + (f" ({low} to {high})" if low != high else "")
    if progress.is_shared:
        text += f", {count_of(left.num_at_a_time, 'block')} at a time"
    if left.source == "earlier-experiments":
        text += ", by earlier experiments"
    return f"{text}, once blocks are measured" if progress.is_idle else text


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """One line for each thing that is not well; runs with the same problem share one."""
    groups: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for problem in problems:
        alone = f" {problem.block}" if problem.run_id is None else ""
        groups[problem.kind, problem.message + alone].append(problem)
    order = {state: number for number, state in enumerate(STATES)}
    ordered = sorted(groups.values(), key=lambda group: order[group[0].kind])
    return [_problem_line(group) for group in ordered]


def _problem_line(group: Sequence[Problem]) -> str:
    first = group[0]
    if first.run_id is None:
        return visible_line(f"block {first.block} {first.kind}: {first.message}")
    number = "" if len(group) == 1 else f"{len(group)} runs "
    runs = first_of([problem.run_id or "" for problem in group], 1)
    return visible_line(f"{number}{first.kind}: {runs}: {first.message}")


def all_lines(progress: Progress) -> list[str]:
    """The progress as it is printed once: totals, each running block, and each problem."""
    running = [block for block in progress.blocks if block.state == "running"]
    rows = [_row(block) for block in running]
    return [
        visible_line(f"{progress.profile}: {state_text(progress)}"),
        summary_line(progress),
        *(visible_line(_sentence(*row)) for row in rows),
        *problem_lines(progress.problems),
    ]


def _sentence(block: str, node: str, devices: str, job: str, runs: str, now: str) -> str:
    where = (f" on {node}" if node else "") + (f" {devices}" if devices else "") + (f" ({job})" if job else "")
    return f"block {block} running{where}: {runs.replace('/', ' of ')} runs ended; {now}"


def picture(progress: Progress, width: int, height: int) -> RenderableType:
    """The progress in at most ``height`` lines of ``width`` columns.

    A bar and totals, the running blocks, what is not well, and a count of all other blocks.
    """
    head = _head(progress, width)
    problems = problem_lines(progress.problems)
    running = [block for block in progress.blocks if block.state == "running"]
    free = height - len(head) - 1  # the last line is the rest
    titles = (2 if running else 0) + (2 if problems else 0)
    for_problems = min(len(problems), max(_LEAST_PROBLEMS, free - titles - len(running)))
    for_running = max(free - titles - for_problems, 1 if running else 0)
    return Group(
        *head,
        *_running_lines(running, for_running, width),
        *_problem_texts(problems, for_problems, width),
        _rest(progress, len(running) - for_running, len(problems) - for_problems, width),
    )


def _line(text: str, width: int, style: str = "") -> Text:

    return Text(shortened(visible_line(text), width), style=style, no_wrap=True, overflow="ellipsis")


def _head(progress: Progress, width: int) -> list[RenderableType]:
    arms = [
        f"{arm.arm} {_run_duration(arm.run_s)} ({arm.num_ended})"
        for arm in progress.arms
        if arm.num_ended and arm.run_s is not None
    ]
    title = f"{progress.profile}: {state_text(progress)}, {_runs(progress)}"
    lines: list[RenderableType] = [
        _line(title, width, "bold"),
        _bar(progress, width),
        _coloured(f"blocks: {_states(progress)}", width),
        _line(time_left_text(progress), width),
    ]
    if arms:
        lines.append(_line(f"a run takes: {first_of(arms, _MANY_ARMS)}", width, "dim"))
    return lines


def _bar(progress: Progress, width: int) -> Text:
    """Ended runs as ``=``, those of blocks that are measured as ``>``, all others as ``.``"""
    ended = sum(block.num_ended for block in progress.blocks)
    going = sum(block.num_runs - block.num_ended for block in progress.blocks if block.state == "running")
    num_ended = width * ended // max(progress.num_runs, 1)
    num_going = -(-width * (ended + going) // max(progress.num_runs, 1)) - num_ended
    parts = [("=" * num_ended, "green"), (">" * num_going, "cyan"), ("." * (width - num_ended - num_going), "dim")]
    return Text.assemble(*parts, no_wrap=True)


def _run_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < _MANY_SECONDS else duration(seconds)


def _coloured(text: str, width: int) -> Text:
    line = _line(text, width)
    for state, colour in _COLOURS.items():
        line.highlight_words([f" {state}"], style=colour)
    return line


def _running_lines(blocks: Sequence[BlockProgress], limit: int, width: int) -> list[RenderableType]:

    if not blocks:
        return []
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    rows = [("block", "node", "devices", "job", "runs", "now"), *map(_row, blocks[:limit])]
    columns = [
        number
        for number, (name, *fields) in enumerate(zip(*rows, strict=True))
        if any(fields) and (width >= _WIDE or name not in {"devices", "job"})
    ]
    for number in columns[1:-1]:
        table.add_column(no_wrap=True, max_width=_LONGEST.get(rows[0][number]), overflow="ellipsis")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.width = width
    for row in rows:
        fields = (visible_line(row[number]) for number in columns)
        table.add_row(*fields, style="dim" if row is rows[0] else None)
    return [_line("", width), table]


def _row(block: BlockProgress) -> tuple[str, str, str, str, str, str]:
    devices = block.devices[0][:_DEVICE_CHARS] if block.devices else ""
    if len(block.devices) > 1:
        devices += f" +{len(block.devices) - 1}"
    current = block.current
    now = "ending" if block.num_ended == block.num_runs else "between two runs" if block.num_ended else "beginning"
    if current is not None:
        elapsed = "" if current.elapsed_s is None else f" {duration(current.elapsed_s)}"
        now = f"{current.arm}: {current.phase}{elapsed}"
    if block.generation is not None and block.generation > 1:
        now += f" (claim {block.generation})"
    runs = f"{block.num_ended}/{block.num_runs}"
    return str(block.block), block.node or "", devices, block.job or "", runs, now


def _problem_texts(lines: Sequence[str], limit: int, width: int) -> list[RenderableType]:
    if not lines:
        return []
    return [_line("", width), _line("Not well", width, "bold"), *(_coloured(line, width) for line in lines[:limit])]


def _rest(progress: Progress, running_left: int, problems_left: int, width: int) -> Text:
    hidden = [
        f"{count_of(count, noun)} not shown"
        for count, noun in ((running_left, "more running block"), (problems_left, "more problem"))
        if count > 0
    ]
    return _line("; ".join([*hidden, str(progress.path)]), width, "dim")


TICK_S: Final = 0.5
"""Seconds between two calls of a caller's functions."""
LOOK_S: Final = 2.0
"""Seconds between two looks at the files."""
_LEAST_WIDTH: Final = 40
_LEAST_HEIGHT: Final = 8


def show_until_done(
    results: ResultDirectory,
    *,
    should_stop: Callable[[], bool],
    on_tick: Callable[[Progress], None],
    is_quiet: bool,
    width: int | None = None,
) -> Progress:
    """Show the progress of ``results`` on stderr until ``should_stop()`` is true; returns the last one.

    Both functions are called about twice a second; ``on_tick`` gets the latest progress. That every run has ended
    does not end the view: only the caller knows whether failed blocks are measured again. ``width`` is the number
    of blocks that can be measured at a time, as far as the caller knows it. With ``is_quiet``, or without a
    terminal, there is one line for each change. A KeyboardInterrupt passes through.
    """
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
def progress_view(stream: TextIO | None = None, *, is_quiet: bool = False) -> Iterator[Show]:
    """Yield the function that shows a progress on ``stream``, by default stderr: drawn over the last one where that
    is a terminal with a width, otherwise as lines of what is new.
    """
    stream = sys.stderr if stream is None else stream
    if is_quiet or not _can_draw(stream):
        yield ChangesInLines(stream).show
        return

    console = TextConsole(file=drawing(stream), force_terminal=True)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def show(progress: Progress) -> None:
            width = max(console.width - 1, _LEAST_WIDTH)  # some terminals break a full line
            live.update(picture(progress, width, max(console.height - 1, _LEAST_HEIGHT)), refresh=True)

        yield show


def _can_draw(stream: TextIO) -> bool:
    """True for a terminal with a width whose cursor can be moved."""
    if not stream.isatty() or os.environ.get("TERM", "").lower() in {"", "dumb", "unknown"}:
        return False
    return os.get_terminal_size(stream.fileno()).columns > 0


class ChangesInLines:
    """Prints a line for each change of the totals, and one for each new problem."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._counts: object = None
        self._problems: set[str] = set()

    def show(self, progress: Progress) -> None:
        """Print what is new since the last call."""
        lines = [line for line in problem_lines(progress.problems) if line not in self._problems]
        self._problems.update(lines)
        if (counts := counts_of(progress)) != self._counts:
            self._counts = counts
            lines.append(summary_line(progress))
        for line in lines:
            print(line, file=self._stream, flush=True)


def counts_of(progress: Progress) -> object:
    """Value that is another one after each change that a line or a document is worth."""
    states = [(block.state, block.num_ended, block.generation) for block in progress.blocks]
    return progress.state, states, progress.problems


_LEAST_S: Final = 0.2
_LONGEST_S: Final = 3600.0


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
        typer.Option(
            "--interval", min=_LEAST_S, max=_LONGEST_S, metavar="S", help="Seconds between two looks at the files."
        ),
    ] = LOOK_S,
) -> None:
    """Show how far an experiment is: blocks, nodes, time left, and what is not well. It only reads files.

    It ends when every run has: with 0 all are done, 4 a run is suspect, 5 a run failed, as 'benchctl run' does. It
    ends with 130 after Ctrl-C, which does not touch the experiment, and when the one process that measures all of
    it was interrupted.
    """
    watcher = Watcher(open_results(results))
    if once:
        _print_once(watcher.look(), as_json=as_json)
        return
    progress = _watch(watcher, interval, as_json=as_json)
    if code := _exit_code(progress):
        raise typer.Exit(code)


def _print_once(progress: Progress, *, as_json: bool) -> None:

    if as_json:
        print_json(progress_document(progress))
        return
    for line in all_lines(progress):
        print(line)


def _watch(watcher: Watcher, interval_s: float, *, as_json: bool) -> Progress:
    """Show the progress until nothing is left, or nobody goes on; returns the last one."""
    if as_json:
        counts: object = None
        while True:
            progress = watcher.look()
            if counts != (counts := counts_of(progress)):
                _print_line(progress)
            if _is_over(progress):
                return progress
            time.sleep(interval_s)
    with progress_view(sys.stdout) as show:
        while True:
            progress = watcher.look()
            show(progress)
            if _is_over(progress):
                return progress
            time.sleep(interval_s)


def _print_line(progress: Progress) -> None:

    print(json_line(progress_document(progress)), flush=True)


def _is_over(progress: Progress) -> bool:
    """True when every run has ended, or the one process that measured them is gone: others do not take over."""
    if progress.state == "running":
        return False  # all may have ended, and the last document is being written
    return progress.has_ended or (not progress.is_shared and progress.state == "interrupted")


def _exit_code(progress: Progress) -> int:
    if not progress.has_ended:
        return INTERRUPTED
    states = progress.run_states
    return A_RUN_FAILED if states.get("failed") else A_RUN_IS_SUSPECT if states.get("suspect") else 0
