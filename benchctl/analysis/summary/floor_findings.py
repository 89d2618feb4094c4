"""Findings on the least that guidance can cost: the step at the peaks of the device beside the measured one."""

import itertools
from collections.abc import Iterator, Sequence
from statistics import fmean

from benchctl.analysis.attribution.roofline import NO_PEAKS
from benchctl.analysis.attribution.work_split import StepFloor
from benchctl.analysis.summary.finding import Finding
from benchctl.analysis.summary.findings import cells_in_words, span_of
from benchctl.analysis.summary.sweep import SweepRow
from benchctl.units import MS_PER_S

_REMEDY = "; 'benchctl micro roofline' measures them for runs to come"


def floor_findings(rows: Sequence[SweepRow]) -> tuple[Finding, ...]:
    """For each guided variant the floor of its step, or one line with the reason why it is unknown."""
    return tuple(
        finding
        for _, group in itertools.groupby(rows, key=lambda row: row.variant)
        for finding in _of_variant(list(group))
    )


def _of_variant(rows: Sequence[SweepRow]) -> Iterator[Finding]:
    floored = [(row, row.floor) for row in rows if isinstance(row.floor, StepFloor)]
    if floored:
        yield _beside_floor([row for row, _ in floored], [floor for _, floor in floored])
    timed = [row for row in rows if row.values.get("step_ms_ratio") is not None]
    unknown = [row for row in timed if isinstance(row.floor, str)]
    for reason in dict.fromkeys(str(row.floor) for row in unknown):
        cells = cells_in_words([row for row in unknown if row.floor == reason])
        remedy = _REMEDY if reason == NO_PEAKS else ""
        sentence = f"{cells}: there is no floor to compare the step with: {reason}{remedy}."
        yield Finding(code="guidance-floor-unknown", sentence=sentence, numbers={})


def _beside_floor(rows: Sequence[SweepRow], floors: Sequence[StepFloor]) -> Finding:
    ratios, measured = [floor.ratio for floor in floors], [floor.measured for floor in floors]
    excess, base = [floor.times_floor for floor in floors], [floor.a_times_floor for floor in floors]
    devices = " and ".join(sorted({floor.hardware for floor in floors}))
    added = span_of([floor.added_s * MS_PER_S for floor in floors], ".3g")
    floor_added = span_of([floor.floor_added_s * MS_PER_S for floor in floors], ".3g")
    sentence = (
        f"{cells_in_words(rows)}: a step takes {span_of(measured, '.3g')} times the baseline's ({added} ms more); "
        f"with all bytes and FLOPs at the peaks of {devices} it would be {span_of(ratios, '.3g')} times "
        f"({floor_added} ms more), so it takes {span_of(excess, '.3g')} times that floor. The baseline's own step "
        f"is {span_of(base, '.3g')} times its floor: the farther it stays behind, the less guidance shows."
    )
    numbers = {
        "step_floor_ratio": fmean(ratios),
        "step_ratio": fmean(measured),
        "step_times_floor": fmean(excess),
        "baseline_times_floor": fmean(base),
        "added_s": fmean(floor.added_s for floor in floors),
        "floor_added_s": fmean(floor.floor_added_s for floor in floors),
    }
    return Finding(code="floor-of-guidance", sentence=sentence, numbers=numbers)
