"""Progress of an experiment on the terminal: bars with time left, or one line per run where nobody watches."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchctl.records.run import PlannedRun, RunRecord

if TYPE_CHECKING:
    from benchctl.measure.experiment import Listener


@dataclass(slots=True)
class _Bars:
    """The two bars: runs of the experiment, requests of the current run."""

    num_runs: int
    is_quiet: bool
    began_s: float = 0.0
    num_ended: int = 0

    def line(self, planned: PlannedRun, record: RunRecord) -> str:
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

    state = _Bars(num_runs=num_runs, is_quiet=is_quiet)
    hidden = is_quiet or not sys.stderr.isatty()
    with (
        tqdm(total=num_runs, desc="runs", unit="run", disable=hidden, position=0) as runs,
        tqdm(total=1, desc="requests", unit="req", disable=hidden, position=1, leave=False) as requests,
    ):

        def started(planned: PlannedRun, num_requests: int) -> None:
            state.began_s = time.monotonic()
            requests.reset(total=num_requests)
            requests.set_description(planned.run_id)

        def advanced(num_done: int) -> None:
            requests.update(num_done - requests.n)

        def ended(planned: PlannedRun, record: RunRecord) -> None:
            runs.update(1)
            line = state.line(planned, record)
            _write_line(line, write=tqdm.write if not hidden else None, is_wanted=hidden or record.state != "done")

        yield Listener(run_started=started, request_done=advanced, run_ended=ended)


def _write_line(line: str, *, write: Callable[..., None] | None, is_wanted: bool) -> None:
    if not is_wanted:
        return
    if write is None:
        print(line, file=sys.stderr, flush=True)
    else:
        write(line, file=sys.stderr)
