"""Step time by batch size: the cost of a step with few sequences and with many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchctl.analysis.summary.runs import CellSummary
from benchctl.records.columns.step_columns import Floats, Integers
from benchctl.report.charts.arms import ArmStyle, arm_styles, clock_note, runs_with_steps
from benchctl.report.page.charts import figure
from benchctl.units import NS_PER_MS

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
