"""The live view of an experiment whose blocks other processes measure."""

import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchctl.cluster.progress import Progress
    from benchctl.records.directory import ResultDirectory

TICK_S: Final = 0.5
"""Seconds between two calls of a caller's functions; files are read less often."""


def show_until_done(
    results: "ResultDirectory",
    *,
    should_stop: "Callable[[], bool]",
    on_tick: "Callable[[Progress], None]",
    is_quiet: bool,
    width: int | None = None,
) -> "Progress":
    """Show the progress of ``results`` until ``should_stop()`` is true; returns the last one.

    Both functions are called about twice a second; ``on_tick`` gets the latest progress. That every run has ended
    does not end the view: only the caller knows whether failed blocks are measured again. ``width`` is the number
    of blocks that can be measured at a time, as far as the caller knows it. With ``is_quiet``, or without a
    terminal, there is one line for each change. A KeyboardInterrupt passes through.
    """
    from benchctl.cluster.progress import progress_of
    from benchctl.cluster.snapshot import SnapshotReader

    del width, is_quiet
    reader, line = SnapshotReader(results), ""
    while True:
        is_last = should_stop()
        progress = progress_of(reader.read())
        on_tick(progress)
        if (text := _summary_line(progress)) != line:
            print(line := text, file=sys.stderr, flush=True)
        if is_last:
            return progress
        time.sleep(TICK_S)


def _summary_line(progress: "Progress") -> str:
    from benchctl.cluster.progress import STATES

    counts = progress.block_states
    return "blocks: " + ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
