"""Progress of an experiment on the terminal: bars with time left, or one line per run where nobody watches."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchctl.records.run import PlannedRun, RunRecord

if TYPE_CHECKING:
    from benchctl.measure.experiment import Listener


@dataclass(slots=True)
class _Course:
    """How far the experiment has come, and since when the current run goes on."""

    num_runs: int
    began_s: float = 0.0
    num_ended: int = 0

    def end_run(self, planned: PlannedRun, record: RunRecord) -> str:
        """Count a run that has ended; returns the line that says so."""
        self.num_ended += 1
        took = time.monotonic() - self.began_s
        text = f"[{self.num_ended}/{self.num_runs}] {planned.run_id}: {record.state} in {took:.1f} s"
        if record.failure is not None:
            return f"{text}; {record.failure.cause}: {record.failure.message}"
        return "; ".join([text, *(f"{warning.code}: {warning.message}" for warning in record.warnings)])


@contextmanager
def experiment_progress(num_runs: int, *, is_quiet: bool) -> Iterator["Listener"]:
    """Yield the listener that draws; ``is_quiet`` writes one line per run to stderr and no bars."""
    from tqdm import tqdm

    from benchctl.measure.experiment import Listener

    course = _Course(num_runs=num_runs)
    hidden = is_quiet or not sys.stderr.isatty()
    with (
        tqdm(total=num_runs, desc="runs", unit="run", disable=hidden, position=0) as runs,
        tqdm(total=1, desc="requests", unit="req", disable=hidden, position=1, leave=False) as requests,
    ):

        def started(planned: PlannedRun, num_requests: int) -> None:
            course.began_s = time.monotonic()
            requests.reset(total=num_requests)
            requests.set_description(planned.run_id)

        def advanced(num_done: int) -> None:
            requests.update(num_done - requests.n)

        def ended(planned: PlannedRun, record: RunRecord) -> None:
            runs.update(1)
            line = course.end_run(planned, record)
            if hidden:
                print(line, file=sys.stderr, flush=True)
            elif record.state != "done":  # the bars show the others
                tqdm.write(line, file=sys.stderr)

        yield Listener(run_started=started, request_done=advanced, run_ended=ended)
