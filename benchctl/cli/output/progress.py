"""Progress of an experiment on the terminal: bars with the time left, or one line per run without a terminal."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from benchctl.cli.streams import drawing, log_line
from benchctl.formats import duration
from benchctl.records.manifest import PlannedRun
from benchctl.records.run import RunRecord
from benchctl.untrusted.text import visible_line, visible_lines

if TYPE_CHECKING:
    from benchctl.measure.experiment import Listener

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

    from benchctl.cli.output.plan import look_text
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
