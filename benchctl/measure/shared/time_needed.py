"""Seconds that a run of an arm takes, by earlier ones, so that no block is begun that would not end in time."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final

from benchctl.errors import RecordError
from benchctl.measure.durations import estimate_durations
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory, arm_label
from benchctl.records.record import PreparedRequest, RunRecord
from benchctl.units import s_from_ns

_ENOUGH: Final = 4
"""Earlier runs of an arm that speak for its next one."""
_AROUND_RUN_S: Final = 1.0
"""Of a run outside its server's life: preparation, the end of its processes, checks of its records."""


def seconds_by_arm(
    results: ResultDirectory,
    profile: Profile,
    requests: Sequence[PreparedRequest],
    arms: Collection[str],
    gpus: Sequence[str],
) -> dict[str, float]:
    """Seconds that a run of each of these arms will take, by the arm's label; absent where nothing is known.

    The longest of an arm's earlier runs in this experiment counts, or else what runs on this machine took.
    """
    took = _took_s(results, set(arms))
    if all(arm in took for arm in arms):
        return took
    estimate = estimate_durations(profile, requests, gpus)
    return {**({} if estimate is None else estimate.run_s), **took}


def _took_s(results: ResultDirectory, arms: set[str]) -> dict[str, float]:
    """The longest of the newest runs of each arm, in seconds."""
    longest: dict[str, float] = {}
    counts = dict.fromkeys(arms, 0)
    for planned in reversed(results.due_plan().runs):
        arm = arm_label(planned.variant, planned.cell)
        if counts.get(arm, _ENOUGH) >= _ENOUGH:
            continue
        with suppress(RecordError):
            directory = results.run(planned.run_id)
            took_s = _duration_s(directory.read()) if directory.is_begun() else None
            if took_s is not None:
                counts[arm] += 1
                longest[arm] = max(longest.get(arm, 0.0), took_s + _AROUND_RUN_S)
    return longest


def _duration_s(record: RunRecord) -> float | None:
    times = record.times
    if record.state not in {"done", "suspect"} or times.launch_ns is None or times.stop_ns is None:
        return None
    return s_from_ns(times.stop_ns - times.launch_ns)
