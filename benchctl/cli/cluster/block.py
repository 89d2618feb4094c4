"""``benchctl run --block I --into DIR``: one block of an experiment that several processes measure."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchctl.cli.experiment import A_RUN_FAILED, A_RUN_IS_SUSPECT, check_gpu, check_machine


def measure_block(
    path: Path, block: int, time_left_s: float | None, *, is_quiet: bool, keeps_raw_logs: bool
) -> int:
    """Measure block ``block`` of ``path``, as far as it is not done; returns the exit code."""
    from benchctl.cli.output.progress import experiment_progress
    from benchctl.measure.result_directory import reopen_experiment
    from benchctl.measure.shared.block import block_runs, check_block, run_block

    reopened = reopen_experiment(path, None)
    results, profile, requests = reopened.results, reopened.profile, reopened.requests
    check_block(results, block)
    check_gpu(profile)
    check_machine(profile, requests, path)
    num_runs = len(block_runs(results, block))
    is_quiet = is_quiet or bool(os.environ.get("CI"))
    try:
        with experiment_progress(num_runs, num_runs, is_quiet=is_quiet) as listener:
            outcome = run_block(
                results,
                profile,
                requests,
                block,
                listener,
                time_left=_time_left(time_left_s),
                keeps_raw_logs=keeps_raw_logs,
                lease_s=profile.cluster.lease_s,
                on_wait=_tell,
            )
    except KeyboardInterrupt:
        _tell(f"block {block} was interrupted; what was measured is kept, and its task may run again")
        raise
    counts = {
        "done": outcome.num_done,
        "suspect": outcome.num_suspect,
        "failed": outcome.num_failed,
        "done before": outcome.num_skipped,
    }
    print(f"block {block}: " + ", ".join(f"{count} {state}" for state, count in counts.items() if count))
    return A_RUN_FAILED if outcome.num_failed else A_RUN_IS_SUSPECT if outcome.num_suspect else 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _time_left(given_s: float | None) -> Callable[[], float | None]:
    """The seconds until this process must end, as the user gave them at its start, else as Slurm tells them."""
    import time

    from benchctl.cluster.slurm.time_left import time_left_in_job

    if given_s is None:
        return time_left_in_job()
    ends_s = time.monotonic() + given_s
    return lambda: ends_s - time.monotonic()
