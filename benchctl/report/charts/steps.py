"""Step time and batch size over a run, and step time by batch size."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from benchctl.analysis.summary.summary import CellSummary, RunSummary
from benchctl.records.columns import Floats, Integers, StepColumns
from benchctl.report.charts import figure
from benchctl.report.charts.arms import arms_of, clock_note, runs_by_block, runs_with_steps
from benchctl.units import NS_PER_MS, NS_PER_S

MAX_STRETCHES: Final = 150
_MIN_STEPS_PER_STRETCH: Final = 4
_MAX_BANDS: Final = 3
"""Bands of more arms than this cover one another."""
_MAX_EXACT_SIZES: Final = 12


def draw_step_time(source: figure.ChartSource) -> figure.Chart:
    """One line for each arm, from the run of one block; at first that in which most arms have a step log."""
    title = "Step time over the run"
    arms = arms_of(source.analysis)
    blocks = runs_by_block(arms, runs_with_steps(arms))
    if not blocks:
        return figure.Chart(id="step-time", title=title, skipped=source.analysis.missing_step_times_reason)
    first, first_runs = next(iter(blocks.items()))
    clock = clock_note(clock for run in first_runs for clock in run.run.columns.clocks)
    origin = "first send" if all(_first_send_ns(run) is not None for run in first_runs) else "first step"
    labels = [arm.label for arm in arms]
    drawn = [label for label in labels if any(run.label == label for runs in blocks.values() for run in runs)]
    has_bands = len(first_runs) <= _MAX_BANDS
    choices = (figure.block_choice(blocks, first), figure.arm_choice(drawn))
    band = figure.layer("area", y_by="low", y2_by="high", opacity=0.2)
    times = (
        ("low", "5%, ms", ".4~g"),
        ("high", "95%, ms", ".4~g"),
        ("mean", "mean, ms", ".4~g"),
        ("steps", "steps"),
    )
    tip = (("arm", "arm"), ("time", "at, s", ".3~f"), ("median", "median, ms", ".4~g"), *times)
    sizes = (("arm", "arm"), ("time", "at, s", ".3~f"), ("sequences", "sequences", ".4~g"))
    same: figure.Spec = {"where": (figure.OF_BLOCK, figure.OF_ARM), "encoding": figure.by_series(labels, drawn)}
    spec = figure.picture(
        [
            figure.panel(
                200,
                figure.axis("step time, ms", zero=True),
                [*([band] if has_bands else []), figure.layer("line", y_by="median", tip=tip)],
                **same,
            ),
            figure.panel(
                110,
                figure.axis("batch size, sequences", zero=True),
                [figure.layer("line", y_by="sequences", tip=sizes)],
                **same,
            ),
        ],
        [row for block, runs in blocks.items() for row in _rows_of_block(block, runs)],
        figure.axis(f"time since the {origin}, s", "time", zero=True),
        choices=choices,
        legend=drawn,
    )
    band_note = ", with the 5-95 % band of its steps" if has_bands else ""
    return figure.Chart(
        id="step-time",
        title=title,
        caption=(
            f"Median step time in ms ({clock}) and mean batch size in up to {MAX_STRETCHES} stretches of a "
            f"run{band_note}; warm-up excluded."
        ),
        definition=(
            "The run is cut into stretches of equal duration; a step belongs to the stretch in which it starts. "
            "Upper panel: median of the step times of a stretch, and their 5th and 95th percentile. Lower panel: "
            f"mean number of sequences in a step. Time counts from the {origin}."
        ),
        spec=spec,
        choices=choices,
    )


def _rows_of_block(block: int, runs: Sequence[RunSummary]) -> Iterator[figure.Row]:
    origins_ns = [_first_send_ns(run) for run in runs]
    for run, origin_ns in zip(runs, origins_ns, strict=True):
        is_aligned = None not in origins_ns and origin_ns is not None
        for row in course_of(run.run.columns, origin_ns if is_aligned else None):
            yield {"block": str(block), "arm": run.label, **row}


def course_of(
    columns: StepColumns, origin_ns: int | None = None, max_stretches: int = MAX_STRETCHES
) -> Iterator[figure.Row]:
    """The steps of one run in stretches of equal duration; stretches in which no step began are left out.

    There are at most ``max_stretches``, of at least four steps on average. ``time`` counts from ``origin_ns``, or
    from the first step. The means, weighted by ``steps``, add up to the mean step of the run. Raises ValueError
    without steps.
    """
    if not len(columns):
        raise ValueError("a run without steps has no course")
    start_ns = int(columns.start_ns.min())
    since_ns = columns.start_ns - start_ns
    span_ns = int((since_ns + columns.dur_ns).max()) or 1
    num_bins = max(1, min(max_stretches, len(columns) // _MIN_STEPS_PER_STRETCH))
    bins = np.minimum(since_ns * num_bins // span_ns, num_bins - 1)
    times_s = (columns.start_ns - (start_ns if origin_ns is None else origin_ns)) / NS_PER_S
    for number in np.unique(bins).tolist():
        chosen = bins == number
        dur_ms = columns.dur_ns[chosen] / NS_PER_MS
        low, median, high = np.percentile(dur_ms, (5, 50, 95)).tolist()
        yield {
            "time": float(times_s[chosen].mean()),
            "low": low,
            "median": median,
            "high": high,
            "mean": float(dur_ms.mean()),
            "steps": len(dur_ms),
            "sequences": float(columns.num_seqs[chosen].mean()),
        }


def _first_send_ns(run: RunSummary) -> int | None:
    """The first send on the clock of the steps; None where that clock is another than the client's."""
    columns = run.run.columns
    first_ns, last_ns = run.record.times.first_send_ns, run.record.times.last_token_ns
    if first_ns is None or last_ns is None or "virtual" in columns.clocks:
        return None
    return first_ns if first_ns <= int(columns.start_ns.min()) <= last_ns else None


def draw_batch_size(source: figure.ChartSource) -> figure.Chart:
    """Mean and 5-95 % of the decode steps of each arm, all its usable runs together."""
    chart_id, title = "step-time-by-batch-size", "Step time by batch size"
    arms = arms_of(source.analysis)
    runs = runs_with_steps(arms)
    decodes = {arm.label: _decode_steps(arm) for arm in arms}
    sizes = np.concatenate([sizes for sizes, _ in decodes.values()]) if decodes else np.array([], dtype=np.int64)
    if not len(sizes):
        reason = "no finished run has steps that only decode" if runs else source.analysis.missing_step_times_reason
        return figure.Chart(id=chart_id, title=title, skipped=reason)
    bins = bins_of(sizes)
    if len(bins) == 1:
        reason = f"every decode step has {next(iter(bins))} sequences: see step_ms"
        return figure.Chart(id=chart_id, title=title, skipped=reason)
    note = clock_note(clock for run in runs for clock in run.run.columns.clocks)
    drawn = [label for label, (of_arm, _) in decodes.items() if len(of_arm)]
    tip = (("arm", "arm"), ("size", "sequences"), ("mean", "mean, ms", ".4~g"), ("steps", "steps"))
    beside: figure.Spec = {"xOffset_by": {"field": "arm", "scale": {"domain": drawn, "paddingOuter": 0.3}}}
    spec = figure.picture(
        [
            figure.panel(
                240,
                figure.axis("time per decode step, ms", zero=True),
                [
                    figure.layer("rule", y_by="low", y2_by="high", **beside),
                    figure.layer("line", y_by="mean", strokeWidth=1.5, **beside),
                    figure.layer(
                        "point",
                        y_by="mean",
                        tip=(*tip, ("low", "5%, ms", ".4~g"), ("high", "95%, ms", ".4~g")),
                        **beside,
                    ),
                ],
                encoding=figure.by_series([arm.label for arm in arms], drawn),
            )
        ],
        [row for label in drawn for row in batch_size_rows(label, *decodes[label], bins)],
        {
            **figure.axis("batch size, sequences in the step", "size", labelAngle=0, grid=False),
            "type": "ordinal",
            "sort": list(bins),
            "scale": {},
        },
        legend=drawn,
    )
    return figure.Chart(
        id=chart_id,
        title=title,
        caption=(
            f"Mean time in ms ({note}) of the steps that only decode, by number of sequences in the step; bars "
            "reach from the 5th to the 95th percentile of the steps."
        ),
        definition=(
            "Σ step time / number of steps, over the decode steps of all usable runs of an arm whose number of "
            "sequences falls into the bin. The bars show how steps scatter; they are not confidence intervals."
        ),
        spec=spec,
    )


def bins_of(sizes: Integers) -> dict[str, tuple[int, int]]:
    """Lowest and highest of the batch sizes that are shown together, by label.

    A bin for each size when they are few, else powers of two: 1, 2, 3-4, 5-8, ...
    """
    distinct: list[int] = np.unique(sizes).tolist()
    if len(distinct) <= _MAX_EXACT_SIZES:
        return {str(size): (size, size) for size in distinct}
    highs = sorted({1 << max(0, size - 1).bit_length() for size in distinct})
    ends = [(high // 2 + 1 if high > 1 else min(1, distinct[0]), high) for high in highs]
    return {str(high) if low == high else f"{low}-{high}": (low, high) for low, high in ends}


def _decode_steps(cell: CellSummary) -> tuple[Integers, Floats]:
    """Batch size and time in ms of every decode step of the usable runs."""
    sizes: list[Integers] = [np.array([], dtype=np.int64)]
    times: list[Floats] = [np.array([], dtype=np.float64)]
    for run in cell.runs:
        if run.record.times_whole_steps:
            columns = run.run.columns
            is_decode = columns.in_phase("decode")
            sizes.append(columns.num_seqs[is_decode])
            times.append(columns.dur_ns[is_decode] / NS_PER_MS)
    return np.concatenate(sizes), np.concatenate(times)


def batch_size_rows(
    label: str, sizes: Integers, times_ms: Floats, bins: dict[str, tuple[int, int]]
) -> Iterator[figure.Row]:
    """One row for each bin in which the arm has steps: their mean, and the 5th and 95th percentile."""
    for name, (least, most) in bins.items():
        part = times_ms[(least <= sizes) & (sizes <= most)]
        if len(part):
            low, high = np.percentile(part, (5, 95)).tolist()
            yield {
                "arm": label,
                "size": name,
                "mean": float(part.mean()),
                "steps": len(part),
                "low": low,
                "high": high,
            }
