"""``benchctl watch``: the progress of an experiment that other processes measure, from its files."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchctl.cli.cluster.view import LOOK_S, counts_of, progress_view
from benchctl.cli.experiment import A_RUN_FAILED, A_RUN_IS_SUSPECT
from benchctl.cli.failures import INTERRUPTED
from benchctl.cli.options.completion import complete_results
from benchctl.cli.output.screen import json_line, print_json

if TYPE_CHECKING:
    from benchctl.cluster.progress import Progress
    from benchctl.cluster.watcher import Watcher

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
    from benchctl.cluster.watcher import Watcher
    from benchctl.records.directory import open_results

    watcher = Watcher(open_results(results))
    if once:
        _print_once(watcher.look(), as_json=as_json)
        return
    progress = _watch(watcher, interval, as_json=as_json)
    if code := _exit_code(progress):
        raise typer.Exit(code)


def _print_once(progress: "Progress", *, as_json: bool) -> None:
    from benchctl.cli.cluster.progress_text import all_lines
    from benchctl.cluster.progress import progress_document

    if as_json:
        print_json(progress_document(progress))
        return
    for line in all_lines(progress):
        print(line)


def _watch(watcher: "Watcher", interval_s: float, *, as_json: bool) -> "Progress":
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


def _print_line(progress: "Progress") -> None:
    from benchctl.cluster.progress import progress_document

    print(json_line(progress_document(progress)), flush=True)


def _is_over(progress: "Progress") -> bool:
    """True when every run has ended, or the one process that measured them is gone: others do not take over."""
    if progress.state == "running":
        return False  # all may have ended, and the last document is being written
    return progress.has_ended or (not progress.is_shared and progress.state == "interrupted")


def _exit_code(progress: "Progress") -> int:
    if not progress.has_ended:
        return INTERRUPTED
    states = progress.run_states
    return A_RUN_FAILED if states.get("failed") else A_RUN_IS_SUSPECT if states.get("suspect") else 0
