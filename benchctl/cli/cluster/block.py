"""``benchctl run --block I --into DIR``: one block of an experiment that several processes measure."""

from pathlib import Path

from benchctl.errors import UsageError


def measure_block(
    path: Path, block: int, time_left_s: float | None, *, is_quiet: bool, keeps_raw_logs: bool
) -> int:
    """Measure block ``block`` of ``path``, as far as it is not done; returns the exit code."""
    del time_left_s, is_quiet, keeps_raw_logs
    raise UsageError(f"block {block} of {path} cannot be measured alone yet")
