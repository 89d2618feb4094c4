"""Step time by batch size: the cost of a step with few sequences and with many.

Step time and batch size over a run, which shows a steady state, a ramp, stalls and a tail.
The time of a step by its sections, one stacked bar for each arm.
Step time and batch size over a run, as two panels of a Plotly figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchctl.analysis.attribution.breakdown import Breakdown
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.summary import CellSummary, RunSummary
from benchctl.records.columns import Floats, Integers, StepColumns
from benchctl.records.schema import SECTION_PARENT
from benchctl.report.charts import figure
from benchctl.report.charts.figure import (
    BLUE,
    GREEN,
    GREY,
    MAX_RUNS_BY_BLOCK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    ArmStyle,
    arm_styles,
    clock_note,
    runs_by_block,
    runs_with_steps,
)
from benchctl.units import NS_PER_MS, NS_PER_S, ms_from_ns

_MAX_EXACT_SIZES: Final = 12
_HEIGHT: Final = 340
_ID: Final = "step-time-by-batch-size"
_TITLE: Final = "Step time by batch size"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeBins:
    """Neighbouring batch sizes that are shown together: bin i holds ``lows[i] <= num_seqs <= highs[i]``."""

    lows: Integers
    highs: Integers

    @property
    def labels(self) -> list[str]:
        pairs = zip(self.lows.tolist(), self.highs.tolist(), strict=True)
        return [str(low) if low == high else f"{low}-{high}" for low, high in pairs]


def bins_of(sizes: Integers) -> SizeBins:
    """A bin for each size when they are few, else powers of two: 1, 2, 3-4, 5-8, ..."""
    distinct = np.unique(sizes)
    if len(distinct) <= _MAX_EXACT_SIZES:
        return SizeBins(lows=distinct, highs=distinct)
    exponents = np.unique(np.ceil(np.log2(np.maximum(distinct, 1)))).astype(np.int64)
    highs = 2**exponents
    return SizeBins(lows=np.where(highs > 1, highs // 2 + 1, min(1, distinct[0])), highs=highs)


def draw_batch_size(source: figure.ChartSource) -> figure.Chart:
    """Mean and 5-95 % of the decode steps of each arm, all its usable runs together."""
    arms = arm_styles(source.analysis)
    runs = runs_with_steps(arms)
    decodes = {arm.label: _decode_steps(arm.cell) for arm in arms}
    sizes = np.concatenate([np.unique(sizes) for sizes, _ in decodes.values()] or [np.array([], dtype=np.int64)])
    if not len(sizes):
        reason = "no finished run has steps that only decode" if runs else source.analysis.missing_step_times_reason
        return figure.no_chart(_ID, _TITLE, reason)
    bins = bins_of(sizes)
    if len(bins.lows) == 1:
        return figure.no_chart(_ID, _TITLE, f"every decode step has {bins.labels[0]} sequences: see step_ms")
    note = clock_note(clock for run in runs for clock in run.run.columns.clocks)
    return figure.drawn(
        _ID,
        _TITLE,
        [batch_size_trace(arm, *decodes[arm.label], bins) for arm in arms if len(decodes[arm.label][0])],
        _layout(bins, _HEIGHT + figure.legend_px(arm.label for arm in arms)),
        caption=(
            f"Mean time in ms ({note}) of the steps that only decode, by number of sequences in the step; bars "
            "reach from the 5th to the 95th percentile of the steps."
        ),
        definition=(
            "Σ step time / number of steps, over the decode steps of all usable runs of an arm whose number of "
            "sequences falls into the bin. The bars show how steps scatter; they are not confidence intervals."
        ),
    )


def _layout(bins: SizeBins, height: int) -> Mapping[str, Any]:
    return figure.layout(
        height,
        scattermode="group",
        scattergap=0.5,
        xaxis=figure.axis(
            "batch size, sequences in the step", type="category", categoryorder="array", categoryarray=bins.labels
        ),
        yaxis=figure.axis("time per decode step, ms", rangemode="tozero"),
    )


def _decode_steps(cell: CellSummary) -> tuple[Integers, Floats]:
    """Batch size and time in ms of every decode step of the usable runs."""
    sizes: list[Integers] = [np.array([], dtype=np.int64)]
    times: list[Floats] = [np.array([], dtype=np.float64)]
    for run in cell.runs:
        if not run.record.times_whole_steps:
            continue
        columns = run.run.columns
        is_decode = columns.in_phase("decode")
        sizes.append(columns.num_seqs[is_decode])
        times.append(columns.dur_ns[is_decode] / NS_PER_MS)
    return np.concatenate(sizes), np.concatenate(times)


def batch_size_trace(arm: ArmStyle, sizes: Integers, times_ms: Floats, bins: SizeBins) -> figure.Trace:
    """One point for each bin in which the arm has steps: their mean, with bars to the 5th and 95th percentile."""
    parts = [times_ms[(low <= sizes) & (sizes <= high)] for low, high in zip(bins.lows, bins.highs, strict=True)]
    filled = [(label, part) for label, part in zip(bins.labels, parts, strict=True) if len(part)]
    means = [float(part.mean()) for _, part in filled]
    percentiles = [np.percentile(part, (5, 95)) for _, part in filled]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": arm.label,
        "offsetgroup": arm.label,
        "x": [label for label, _ in filled],
        "y": figure.rounded(means, 8),
        "error_y": _error_bars(means, percentiles, arm.color),
        "line": {"color": arm.color, "dash": arm.dash, "width": 1.5},
        "marker": {"color": arm.color, "size": 7},
        "customdata": [
            [len(part), *figure.rounded(pair.tolist(), 5)]
            for (_, part), pair in zip(filled, percentiles, strict=True)
        ],
        "hovertemplate": (
            "%{x} sequences: %{y:.4~g} ms, mean of %{customdata[0]:,} steps"
            "<br>5-95 %: %{customdata[1]:.4~g}-%{customdata[2]:.4~g} ms"
        ),
    }


def _error_bars(means: Sequence[float], percentiles: Sequence[Floats], hex_color: str) -> figure.Trace:
    """Distances from the mean; none where a few extreme steps have pulled the mean beyond a percentile."""
    return {
        "type": "data",
        "symmetric": False,
        "array": figure.rounded(
            max(0.0, float(high) - mean) for mean, (_, high) in zip(means, percentiles, strict=True)
        ),
        "arrayminus": figure.rounded(
            max(0.0, mean - float(low)) for mean, (low, _) in zip(means, percentiles, strict=True)
        ),
        "color": hex_color,
        "thickness": 1.5,
        "width": 3,
    }


MAX_STRETCHES: Final = 150
TITLE: Final = "Step time over the run"
_MIN_STEPS_PER_STRETCH: Final = 4
_MAX_BANDS: Final = 3
"""Bands of more arms than this cover one another."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """The steps of one run in stretches of equal duration; stretches in which no step began are left out."""

    time_s: Floats
    """Mean start of the steps of each stretch."""
    count: Floats
    mean_ms: Floats
    """Weighted by ``count`` these add up to the mean step of the run."""
    low_ms: Floats
    """5th percentile of the steps of the stretch."""
    median_ms: Floats
    high_ms: Floats
    """95th percentile."""
    num_seqs: Floats
    """Mean batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The courses of the arms in one block, and the moment from which their time counts."""

    courses: tuple[tuple[ArmStyle, Course], ...]
    block: int
    clock: str
    origin: str
    """``first send``, or ``first step`` where the steps have another clock than the client."""

    @property
    def has_bands(self) -> bool:
        return len(self.courses) <= _MAX_BANDS

    @property
    def time_axis(self) -> str:
        return f"time since the {self.origin}, s"

    def caption(self) -> str:
        """One sentence about lines and bands."""
        band = ", with the 5-95 % band of its steps" if self.has_bands else ", 5-95 % of its steps on hover"
        return (
            f"Median step time in ms ({self.clock}) and mean batch size in up to {MAX_STRETCHES} stretches of a "
            f"run{band}; warm-up excluded."
        )


def step_times(analysis: AnalyzedExperiment) -> StepTimes | None:
    """One course for each arm, from the block in which most arms have a step log; None without a step log."""
    return next(iter(step_times_by_block(analysis, max_runs=1)), None)


def step_times_by_block(analysis: AnalyzedExperiment, max_runs: int = MAX_RUNS_BY_BLOCK) -> tuple[StepTimes, ...]:
    """The courses of each block, at most ``max_runs`` in all; first the block in which most arms have a log."""
    arms = arm_styles(analysis)
    blocks = runs_by_block(arms, runs_with_steps(arms), max_runs)
    return tuple(_times_of_block(block, runs) for block, runs in blocks.items())


def _times_of_block(block: int, runs: Sequence[tuple[ArmStyle, RunSummary]]) -> StepTimes:
    logs = [(arm, run, run.run.columns) for arm, run in runs]
    origins_ns = [_first_send_ns(run, columns) for _, run, columns in logs]
    is_aligned = None not in origins_ns
    courses = []
    for (arm, _, columns), origin_ns in zip(logs, origins_ns, strict=True):
        start_ns = origin_ns if is_aligned and origin_ns is not None else int(columns.start_ns.min())
        courses.append((arm, course_of(columns, start_ns)))
    return StepTimes(
        courses=tuple(courses),
        block=block,
        clock=clock_note(clock for _, _, columns in logs for clock in columns.clocks),
        origin="first send" if is_aligned else "first step",
    )


def course_of(columns: StepColumns, origin_ns: int, max_stretches: int = MAX_STRETCHES) -> Course:
    """Shorten the log of a run to at most ``max_stretches`` stretches of at least four steps on average.

    Times count from ``origin_ns``. Raises ValueError without steps.
    """
    if not len(columns):
        raise ValueError("a run without steps has no course")
    since_ns = columns.start_ns - columns.start_ns.min()
    span_ns = int((since_ns + columns.dur_ns).max()) or 1
    num_bins = max(1, min(max_stretches, len(columns) // _MIN_STEPS_PER_STRETCH))
    bins = np.minimum(since_ns * num_bins // span_ns, num_bins - 1)
    order = np.argsort(bins, kind="stable")
    firsts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    count = np.diff(firsts, append=len(columns)).astype(np.float64)
    dur_ms = columns.dur_ns[order] / NS_PER_MS
    percentiles = np.array([np.percentile(part, (5, 50, 95)) for part in np.split(dur_ms, firsts[1:])])
    return Course(
        time_s=np.add.reduceat((columns.start_ns[order] - origin_ns) / NS_PER_S, firsts) / count,
        count=count,
        mean_ms=np.add.reduceat(dur_ms, firsts) / count,
        low_ms=percentiles[:, 0],
        median_ms=percentiles[:, 1],
        high_ms=percentiles[:, 2],
        num_seqs=np.add.reduceat(columns.num_seqs[order], firsts) / count,
    )


def _first_send_ns(run: RunSummary, columns: StepColumns) -> int | None:
    """The first send on the clock of the steps; None where that clock is another than the client's."""
    first_ns, last_ns = run.record.times.first_send_ns, run.record.times.last_token_ns
    if first_ns is None or last_ns is None or "virtual" in columns.clocks:
        return None
    return first_ns if first_ns <= int(columns.start_ns.min()) <= last_ns else None


NO_STEPS: Final = "no finished run has a step log"
NO_SECTIONS: Final = "a forward pass is one section"
UNNAMED: Final = "not named by any section"
_COLORS: Final = {
    "schedule": SKY,
    "draft": GREEN,
    "backfill": ORANGE,
    "model_forward": BLUE,
    "sampler_total": PURPLE,
    "pre_lvm": YELLOW,
    "lvm_apply_outer": VERMILION,
    "sample": PURPLE,
    "lvm_build_pending": ORANGE,
    "lvm_forward": VERMILION,
    "lvm_apply_guidance": GREEN,
    "value_model_load": YELLOW,
}
"""Two sections of one colour are never both leaves: one is the parent of the other, has another pattern, or is of
speculation and the other of guidance, which exclude each other."""
_PATTERNS: Final = {"value_model_load": "x", UNNAMED: "/"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPart:
    """One section in every bar, in ms per step. ``pattern`` is empty, ``/`` or ``x``."""

    name: str
    values_ms: tuple[float, ...]

    @property
    def color(self) -> str:
        return _COLORS.get(self.name, GREY)

    @property
    def pattern(self) -> str:
        return _PATTERNS.get(self.name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionBars:
    """One bar for each arm; its parts add up to the mean step, or to the sampler where a log times no more."""

    labels: tuple[str, ...]
    parts: tuple[SectionPart, ...]
    longest_ms: float
    clock: str
    clock_notes: tuple[str, ...]
    """The clocks in full sentences."""
    covers_steps: bool

    @property
    def whole(self) -> str:
        return "step" if self.covers_steps else "sampler"

    @property
    def title(self) -> str:
        return "Time per step by section" if self.covers_steps else "Time in the sampler by section"

    @property
    def axis(self) -> str:
        return "time per step, ms" if self.covers_steps else "time in the sampler per step, ms"


def section_bars(cells: Sequence[CellSummary]) -> SectionBars | None:
    """The bars of all cells with a step log; None where no cell has one."""
    pairs = [(cell.label, breakdown) for cell in cells if (breakdown := cell.breakdown()) is not None]
    if not pairs:
        return None
    breakdowns = [breakdown for _, breakdown in pairs]
    return SectionBars(
        labels=tuple(label for label, _ in pairs),
        parts=section_parts(breakdowns),
        longest_ms=max(ms_from_ns(breakdown.step.mean_ns) for breakdown in breakdowns),
        clock=clock_note(clock for breakdown in breakdowns for clock in breakdown.clocks),
        clock_notes=tuple(sorted({breakdown.clock_note for breakdown in breakdowns})),
        covers_steps=all(breakdown.covers_steps for breakdown in breakdowns),
    )


def section_parts(breakdowns: Sequence[Breakdown]) -> tuple[SectionPart, ...]:
    """Every leaf of the sections, and the unnamed rest last; parts that take no time anywhere are left out.

    The values of one breakdown add up to its mean step.
    """
    leaves = [breakdown.leaf_means_ns() for breakdown in breakdowns]
    names = [name for name in SECTION_PARENT if any(name in leaf for leaf in leaves)]
    values_ms = {name: tuple(ms_from_ns(leaf.get(name, 0.0)) for leaf in leaves) for name in names}
    values_ms[UNNAMED] = tuple(
        max(0.0, ms_from_ns(sum(mean for name, mean in leaf.items() if name not in names))) for leaf in leaves
    )
    return tuple(SectionPart(name=name, values_ms=values) for name, values in values_ms.items() if any(values))


def guidance_parts(cells: Sequence[CellSummary]) -> tuple[tuple[CellSummary, ...], tuple[SectionPart, ...], str]:
    """The cells that apply guidance, its parts in ms per step, and the clock; empty without such cells."""
    applying = [
        (cell, breakdown, section)
        for cell in cells
        if (breakdown := cell.breakdown()) is not None
        and (section := breakdown.section("lvm_apply_outer")) is not None
        and section.children
    ]
    means_ms = [{child.name: ms_from_ns(child.mean_ns) for child in section.children} for _, _, section in applying]
    names = [child for child, parent in SECTION_PARENT.items() if parent == "lvm_apply_outer"]
    parts = [SectionPart(name=name, values_ms=tuple(mean.get(name, 0.0) for mean in means_ms)) for name in names]
    rest_ms = [ms_from_ns(max(0, section.children[-1].total_ns) / section.num_steps) for _, _, section in applying]
    parts.append(SectionPart(name=UNNAMED, values_ms=tuple(rest_ms)))
    return (
        tuple(cell for cell, _, _ in applying),
        tuple(part for part in parts if any(part.values_ms)),
        clock_note(clock for _, breakdown, _ in applying for clock in breakdown.clocks),
    )


_STEP_TIME_HEIGHT: Final = 420
_STEP_TIME_ID: Final = "step-time"


def draw_step_time(source: figure.ChartSource) -> figure.Chart:
    """One line for each arm, from the run of one block; at first that in which most arms have a step log."""
    blocks = step_times_by_block(source.analysis)
    if not blocks:
        return figure.no_chart(_STEP_TIME_ID, TITLE, source.analysis.missing_step_times_reason)
    first = blocks[0]
    labels = list(dict.fromkeys(arm.label for times in blocks for arm, _ in times.courses))
    y_axes = [
        figure.axis("step time, ms", rangemode="tozero"),
        figure.axis("batch size,<br>sequences", rangemode="tozero"),
    ]
    return figure.drawn(
        _STEP_TIME_ID,
        TITLE,
        [
            {**trace, "meta": {"block": str(times.block), "arm": arm.label}}
            for times in blocks
            for arm, course in times.courses
            for trace in _traces(arm, course, has_band=first.has_bands)
        ],
        figure.layout(
            _STEP_TIME_HEIGHT + figure.legend_px(labels),
            **figure.panels(figure.axis(first.time_axis, rangemode="tozero"), y_axes, shares=(3, 2)),
        ),
        caption=first.caption(),
        definition=(
            "The run is cut into stretches of equal duration; a step belongs to the stretch in which it starts. "
            "Upper panel: median of the step times of a stretch, and their 5th and 95th percentile. Lower panel: "
            f"mean number of sequences in a step. Time counts from the {first.origin}."
        ),
        choices=(figure.block_choice((times.block for times in blocks), first.block), figure.arm_choice(labels)),
    )


def _traces(arm: ArmStyle, course: Course, *, has_band: bool) -> list[figure.Trace]:
    x = figure.rounded(course.time_s)
    low, median, high = (figure.rounded(values, 5) for values in (course.low_ms, course.median_ms, course.high_ms))
    line = {"type": "scatter", "mode": "lines", "name": arm.label, "legendgroup": arm.label, "x": x}
    style = {"color": arm.color, "dash": arm.dash, "width": 1.8}
    counts = [int(count) for count in course.count]
    hover = list(zip(low, high, figure.rounded(course.mean_ms, 8), counts, strict=True))
    traces: list[figure.Trace] = [
        {
            **line,
            "y": median,
            "line": style,
            "customdata": [list(row) for row in hover],
            "hovertemplate": (
                "%{x:.3~f} s: median %{y:.4~g} ms<br>5-95 %: %{customdata[0]:.4~g}-%{customdata[1]:.4~g} ms"
                "<br>mean %{customdata[2]:.4~g} ms of %{customdata[3]} steps"
            ),
        },
        {
            **line,
            "y": figure.rounded(course.num_seqs, 5),
            "yaxis": "y2",
            "line": style,
            "showlegend": False,
            "hovertemplate": "%{x:.3~f} s: %{y:.4~g} sequences",
        },
    ]
    return [figure.band(x, low, high, arm.color, legendgroup=arm.label), *traces] if has_band else traces
