"""``benchctl watch``: the progress of an experiment that other processes measure, from its files.

Lines that are drawn over on a terminal, a line for each change in a log, or a document for each change as JSON.
"""

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, TextIO, TypeAlias

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from benchctl.cli.failures import drawing, exit_code_of, width_of
from benchctl.cli.options import complete_results
from benchctl.cli.screen import TextConsole, json_text, print_json, say
from benchctl.cluster.progress import STATES, BlockProgress, Problem, Progress, Watcher
from benchctl.errors import INTERRUPTED_CODE
from benchctl.records.directory import ResultDirectory, open_results
from benchctl.units import count_of, duration, first_of, folded
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
_LEAST_HEIGHT: Final = 8
TICK_S: Final = 0.5
"""Seconds between two calls of a caller's functions."""
LOOK_S: Final = 2.0
"""Seconds between two looks at the files."""


def _title(progress: Progress) -> str:
    """Profile and state; one whose blocks are handed out, and that nobody measures now, waits for tasks."""
    is_waiting = progress.is_shared and not progress.running and not progress.has_ended
    return f"{progress.profile}: {'waiting' if is_waiting else progress.state}"


def _blocks(progress: Progress) -> str:
    counts = Counter(block.state for block in progress.blocks)
    return "blocks: " + ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def _runs(progress: Progress) -> str:
    """Ended runs, and the time left."""
    left = "time left unknown until runs have ended"
    if progress.has_ended:
        left = "nothing is left to measure"
    elif not progress.running:
        is_left = any(block.state in {"lost", "interrupted"} for block in progress.blocks)
        advice = (
            f"; unless a command or a queued task does, continue with: benchctl run --resume {progress.directory}"
        )
        left = f"nothing is measured now{advice if is_left else ''}"
    elif progress.time_left_s is not None:
        left = f"about {duration(progress.time_left_s)} left"
    return f"{progress.num_ended} of {progress.num_runs} runs ended; {left}"


def _running_line(block: BlockProgress) -> str:
    """A running block: where, how far, and what it does now; what is unknown is left out."""
    now = "ending" if block.num_ended == block.num_runs else "between two runs" if block.num_ended else "beginning"
    if block.current is not None:
        elapsed = "" if block.current.elapsed_s is None else f" {duration(block.current.elapsed_s)}"
        now = f"{block.current.arm}: {block.current.phase}{elapsed}"
    where = "" if block.node is None else f" on {block.node}"
    where += f" {first_of(block.devices, 1)}" if block.devices else ""
    where += "" if block.job is None else f" ({block.job})"
    return f"block {block.block} running{where}: {block.num_ended} of {block.num_runs} runs ended; {now}"


def _problem_lines(progress: Progress) -> list[str]:
    """One line for each thing that is not well; runs with the same problem share one."""
    groups: dict[tuple[str, str, int | None], list[Problem]] = defaultdict(list)
    for problem in sorted(progress.problems, key=lambda problem: ("late", *STATES).index(problem.kind)):
        groups[problem.kind, problem.message, problem.block if problem.run_id is None else None].append(problem)
    lines = []
    for (kind, message, block), group in groups.items():
        runs = first_of([problem.run_id or "" for problem in group], 1)
        number = "" if len(group) == 1 else f"{len(group)} runs "
        lines.append(f"{number}{kind}: {runs}: {message}" if block is None else f"block {block} {kind}: {message}")
    return lines


def progress_lines(progress: Progress, height: int | None = None) -> list[str]:
    """The progress in at most ``height`` lines, None for all: totals, running blocks, and problems.

    The last line of a cut one says what was left out.
    """
    lines = [_title(progress), _runs(progress), _blocks(progress)]
    running, problems = [_running_line(block) for block in progress.running], _problem_lines(progress)
    num_running, num_problems = len(running), len(problems)
    if height is not None and len(lines) + num_running + num_problems > height:
        free = height - len(lines) - 1
        num_problems = min(num_problems, max(_LEAST_PROBLEMS, free - num_running))
        num_running = min(num_running, free - num_problems)
    lines += [*running[:num_running], *problems[:num_problems]]
    left = {"more running block": len(running) - num_running, "more problem": len(problems) - num_problems}
    if any(left.values()):
        lines.append("; ".join(f"{count_of(count, noun)} not shown" for noun, count in left.items() if count))
    return [visible_line(line) for line in lines]


def _on_one_line(text: str) -> Text:
    """A text that a terminal cuts at its width, with states in their colours."""
    line = Text(text, no_wrap=True, overflow="ellipsis")
    for state, colour in _COLOURS.items():
        line.highlight_words([f" {state}"], style=colour)
    return line


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
        lines = [line for line in map(visible_line, _problem_lines(progress)) if line not in self._told]
        self._told.update(lines)
        lines.append(f"{_blocks(progress)}; {_runs(progress)}")
        text = folded("\n".join(lines), width_of(self._stream))
        print(json_text(msgspec.to_builtins(progress)) if self._as_json else text, file=self._stream, flush=True)


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
            lines = progress_lines(progress, max(console.height - 1, _LEAST_HEIGHT))
            live.update(Group(*map(_on_one_line, lines)), refresh=True)

        yield show


def _follow(watcher: Watcher, show: Show, is_over: Callable[[Progress], bool]) -> Progress:
    """Show what each look at the files sees until ``is_over``, which is asked at every tick; returns the last."""
    while True:
        progress, looked_s = watcher.look(), time.monotonic()
        show(progress)
        while not (is_done := is_over(progress)) and time.monotonic() - looked_s < LOOK_S:
            time.sleep(TICK_S)
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
        _follow(Watcher(results, width), show, lambda _: is_over())


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
) -> None:
    """Show how far an experiment is: blocks, nodes, time left, and problems. It only reads files.

    It ends when every run has: with 0 all are done, 4 a run is suspect, 5 a run failed, as 'benchctl run' does. It
    ends with 130 after Ctrl-C, which does not touch the experiment, and when the one process that measures all of
    it was interrupted.
    """
    watcher = Watcher(open_results(results))
    if once and as_json:
        print_json(msgspec.to_builtins(watcher.look()))
    elif once:
        say("\n".join(progress_lines(watcher.look())))
    else:
        with _view(sys.stdout, as_json=as_json) as show:
            progress = _follow(watcher, show, _is_over)
        code = exit_code_of(progress.runs.get("failed", 0), progress.runs.get("suspect", 0))
        raise typer.Exit(code if progress.has_ended else INTERRUPTED_CODE)


def _is_over(progress: Progress) -> bool:
    """True when every run has ended, or the one process that measured them is gone: others do not take over."""
    if progress.state == "running":
        return False  # all may have ended, and the last document is being written
    return progress.has_ended or (not progress.is_shared and progress.state == "interrupted")
