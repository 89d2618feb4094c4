"""Time of a step: bars of its sections and of FLOPs; its course over a run, and by batch size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from benchctl.analysis.attribution.breakdown import Breakdown
from benchctl.analysis.experiment.summary import CellSummary, RunSummary
from benchctl.records.columns import Floats, Integers, StepColumns
from benchctl.records.schema import SECTION_PARENT
from benchctl.report.charts import figure
from benchctl.report.charts.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from benchctl.units import NS_PER_MS, NS_PER_S, PETA, TERA, ms_from_ns, short_number

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
    "value_model_load": "#8C6D31",
    "base: projections": BLUE,
    "base: attention": SKY,
    "base: vocabulary head": PURPLE,
    "value model: prefill": YELLOW,
    "value model: extend prefixes": ORANGE,
    "value model: score candidates": VERMILION,
    "draft model": GREEN,
}
"""Two sections of one colour are never both leaves: one is the parent of the other, or is of speculation and the
other of guidance, which exclude each other."""
_BAR_PX: Final = 34

Parts = Mapping[str, float]
"""Value of each part of a bar, from left to right."""


def draw_sections(subject: figure.Subject) -> figure.Chart | None:
    """The baseline on top; every bar is as long as the mean step of its arm, or its sampler.

    None for forward passes, which have one section.
    """
    if subject.analysis.passes is not None:
        return None
    bars = {arm.label: each for arm in subject.arms if (each := arm.breakdown()) is not None}
    is_whole = all(breakdown.covers_steps for breakdown in bars.values())
    title = "Time per step by section" if is_whole else "Time in the sampler by section"
    chart = figure.Chart(id="sections", title=title, file="per_step_breakdown.png")
    if not bars:
        return replace(chart, skipped=subject.analysis.missing_step_times_reason)
    clock = figure.clock_note(clock for breakdown in bars.values() for clock in breakdown.clocks)
    mean = "Mean time of a step" if is_whole else "Mean time in the sampler of a step"
    limit = "" if is_whole else " Not of whole steps: the step log times the sampler alone."
    notes = "; ".join(sorted({breakdown.clock_note for breakdown in bars.values()}))
    return replace(
        chart,
        caption=f"{mean} in ms ({clock}) and the sections it consists of, all usable runs of an arm.{limit}",
        definition=(
            "Σ time of the section / number of all steps, so that the sections of an arm add up to its mean "
            f"{'step' if is_whole else 'sampler'}. {notes}."
        ),
        spec=stacked_bars(
            [(label, section_parts(breakdown)) for label, breakdown in bars.items()],
            "time per step, ms" if is_whole else "time in the sampler per step, ms",
        ),
    )


def section_parts(breakdown: Breakdown) -> Parts:
    """Every leaf of the sections in ms per step, and the unnamed rest last; together the mean step."""
    leaves = breakdown.leaf_means_ns
    parts = {name: ms_from_ns(leaves[name]) for name in SECTION_PARENT if name in leaves}
    rest = ms_from_ns(sum(mean for name, mean in leaves.items() if name not in parts))
    return {**parts, UNNAMED: max(0.0, rest)}


def draw_flops(subject: figure.Subject) -> figure.Chart:
    """FLOPs as the published rule charges them, and as the step log shows them."""
    bars = {}
    for cell in subject.arms:
        flops = [run.flops for run in cell.runs if run.flops is not None]
        for kind, accounts in (
            ("published", [account.published for account in flops]),
            ("observed", [account.observed for account in flops]),
        ):
            parts = [
                {
                    "base: projections": account.of("base").linear,
                    "base: attention": account.of("base").attention,
                    "base: vocabulary head": account.of("base").head,
                    "value model: prefill": account.of("value_prefill").total,
                    "value model: extend prefixes": account.of("value_extend").total,
                    "value model: score candidates": account.of("value_candidates").total,
                    "draft model": account.of("draft").total,
                }
                for account in accounts
                if account is not None
            ]
            if parts and len(parts) == len(cell.runs):
                means = {name: sum(each[name] for each in parts) / len(parts) for name in parts[0]}
                bars[f"{cell.label}, {kind}"] = means
    title = "FLOPs of a run: charged by the published rule, and observed in the step log"
    chart = figure.Chart(id="flops", title=title, section="", file="flops_breakdown.png")
    if not bars:
        reason = "FLOPs are unknown: no finished run with known model shapes and token counts"
        return replace(chart, skipped=reason)
    largest = max(sum(parts.values()) for parts in bars.values())
    unit, name = (PETA, "PFLOPs") if largest >= PETA / 2 else (TERA, "TFLOPs")
    scaled = [(label, {part: value / unit for part, value in parts.items()}) for label, parts in bars.items()]
    return replace(
        chart,
        caption="Model FLOPs, not a measurement; means over the usable runs of an arm.",
        spec=stacked_bars(scaled, f"{name} per run"),
    )


def stacked_bars(bars: Sequence[tuple[str, Parts]], x_title: str) -> figure.Spec:
    """Horizontal bars, the first on top, each with its total behind it. Parts without any value are left out.

    A part has a number from a tenth of the longest bar on, and an entry in the legend from a thousandth on.
    """
    whole = {figure.wrapped(label): parts for label, parts in bars}
    names = list(dict.fromkeys(name for parts in whole.values() for name, value in parts.items() if value))
    names = [*(name for name in _COLORS if name in names), *(name for name in names if name not in _COLORS)]
    longest = max(sum(parts.values()) for parts in whole.values()) or 1.0
    rows, ends = [], []
    for label, parts in whole.items():
        end = 0.0
        for name in names or [UNNAMED]:
            value, start = parts.get(name, 0.0), end
            end += value
            number = short_number(value) if value >= 0.1 * longest else ""
            ink = "black" if _COLORS.get(name, GREY) in {YELLOW, SKY, GREY, ORANGE, PURPLE} else "white"
            row = {"bar": label, "part": name, "value": value, "start": start, "end": end}
            rows.append({**row, "middle": (start + end) / 2, "number": number, "ink": ink})
        ends.append({"bar": label, "end": end, "number": short_number(end)})
    visible = [name for name in names if max(p.get(name, 0.0) for p in whole.values()) >= 0.001 * longest]
    color = figure.by_color("part", {name: _COLORS.get(name, GREY) for name in names or [UNNAMED]})
    color["legend"] = {"symbolOpacity": 1, "values": visible} if visible else None
    left = 14 + 7 * min(figure.LINE_CHARACTERS, max(len(line) for label in whole for line in label.split("\n")))
    panel = figure.panel(
        max(_BAR_PX, 16 * (1 + max(label.count("\n") for label in whole))) * len(whole),
        {
            "field": "bar",
            "type": "nominal",
            "title": None,
            "sort": list(whole),
            "axis": {"ticks": False, "grid": False, "labelExpr": "split(datum.label, '\\n')"},
        },
        [
            figure.layer(
                "bar",
                x2_by="end",
                color_by=color,
                height=_BAR_PX * 2 // 3,
                tip=[("bar", "arm"), ("part", "part"), ("value", x_title, ".4~g")],
            ),
            figure.layer(
                "text", x_by="middle", text_by="number", color_by={"field": "ink", "scale": None}, fontSize=11
            ),
            figure.layer(
                "text", x_by="end", text_by="number", align="left", dx=5, fontWeight="bold", data={"name": "ends"}
            ),
        ],
    )
    x = figure.axis(x_title, "start", domain=(0, 1.1 * longest))
    return figure.picture([panel], rows, x, legend=visible, left=left, ends=ends)


MAX_STRETCHES: Final = 150


def draw_step_time(subject: figure.Subject) -> figure.Chart:
    """One line for each arm, from the run of one block; at first that in which most arms have a step log."""
    arms = subject.arms
    chart = figure.Chart(id="step-time", title="Step time over the run", file="step_time_over_time.png")
    blocks = figure.runs_by_block(arms, _runs_with_steps(arms))
    if not blocks:
        return replace(chart, skipped=subject.analysis.missing_step_times_reason)
    first_runs = next(iter(blocks.values()))
    clock = figure.clock_note(clock for run in first_runs for clock in run.run.columns.clocks)
    origin = "first step" if any(_first_send_ns(run) is None for run in first_runs) else "first send"
    drawn = figure.labels_of(arms, blocks)
    has_bands = len(first_runs) <= figure.MAX_BANDS
    at = (("arm", "arm"), ("time", "at, s", ".3~f"))
    ends = (("low", "5%, ms", ".4~g"), ("high", "95%, ms", ".4~g"))
    times = (*at, ("median", "median, ms", ".4~g"), *ends, ("mean", "mean, ms", ".4~g"), ("steps", "steps"))
    panels = {
        (200, "step time, ms"): [
            *([figure.layer("area", y_by="low", y2_by="high", opacity=0.2)] if has_bands else []),
            figure.layer("line", y_by="median", tip=times),
        ],
        (110, "batch size, sequences"): [
            figure.layer("line", y_by="sequences", tip=(*at, ("sequences", "sequences", ".4~g")))
        ],
    }
    choices = (figure.block_choice(blocks), figure.arm_choice(drawn))
    return replace(
        chart,
        caption=(
            f"Median step time in ms ({clock}) and mean batch size in up to {MAX_STRETCHES} stretches of a "
            f"run{', with the 5-95 % band of its steps' if has_bands else ''}; warm-up excluded."
        ),
        definition=(
            "The run is cut into stretches of equal duration; a step belongs to the stretch in which it starts. "
            "Upper panel: median of the step times of a stretch, and their 5th and 95th percentile. Lower panel: "
            f"mean number of sequences in a step. Time counts from the {origin}."
        ),
        spec=figure.picture(
            [
                figure.panel(
                    height,
                    figure.axis(y_title, zero=True),
                    layers,
                    where=(figure.OF_BLOCK, figure.OF_ARM),
                    encoding=figure.by_series([arm.label for arm in arms], drawn),
                )
                for (height, y_title), layers in panels.items()
            ],
            [row for block, runs in blocks.items() for row in _rows_of_block(block, runs)],
            figure.axis(f"time since the {origin}, s", "time", zero=True),
            choices=choices,
            legend=drawn,
        ),
        choices=choices,
    )


def _runs_with_steps(arms: Sequence[CellSummary]) -> list[RunSummary]:
    """The usable runs whose step log has steps after the warm-up and times whole steps."""
    return [run for arm in arms for run in arm.runs if run.record.times_whole_steps and len(run.run.columns)]


def _rows_of_block(block: int, runs: Sequence[RunSummary]) -> Iterator[figure.Row]:
    origins_ns = [_first_send_ns(run) for run in runs]
    for run, origin_ns in zip(runs, origins_ns, strict=True):
        for row in course_of(run.run.columns, None if None in origins_ns else origin_ns):
            yield {"block": str(block), "arm": run.label, **row}


def course_of(
    columns: StepColumns, origin_ns: int | None = None, max_stretches: int = MAX_STRETCHES
) -> Iterator[figure.Row]:
    """The steps of one run in stretches of equal duration; stretches in which no step began are left out.

    There are at most ``max_stretches``, of at least four steps on average. ``time`` counts from ``origin_ns``, or
    from the first step. The means, weighted by ``steps``, add up to the mean step of the run. Raises ValueError
    without steps.
    """
    start_ns = int(columns.start_ns.min())
    since_ns = columns.start_ns - start_ns
    span_ns = int((since_ns + columns.dur_ns).max()) or 1
    num_bins = max(1, min(max_stretches, len(columns) // 4))
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


def draw_batch_size(subject: figure.Subject) -> figure.Chart:
    """Mean and 5-95 % of the decode steps of each arm, all its usable runs together."""
    chart_id, title = "step-time-by-batch-size", "Step time by batch size"
    arms = subject.arms
    runs = _runs_with_steps(arms)
    decodes = {arm.label: decode for arm in arms if len((decode := _decode_steps(arm, runs))[0])}
    bins = bins_of(np.concatenate([sizes for sizes, _ in decodes.values()])) if decodes else {}
    if len(bins) < 2:
        missing = (
            "no finished run has steps that only decode" if runs else subject.analysis.missing_step_times_reason
        )
        reason = f"every decode step has {next(iter(bins))} sequences: see step_ms" if bins else missing
        return figure.Chart(id=chart_id, title=title, skipped=reason)
    drawn = list(decodes)
    beside: figure.Spec = {"xOffset_by": {"field": "arm", "scale": {"domain": drawn, "paddingOuter": 0.3}}}
    tip = (("arm", "arm"), ("size", "sequences"), ("mean", "mean, ms", ".4~g"), ("steps", "steps"))
    ends = (("low", "5%, ms", ".4~g"), ("high", "95%, ms", ".4~g"))
    panel = figure.panel(
        240,
        figure.axis("time per decode step, ms", zero=True),
        [
            figure.layer("rule", y_by="low", y2_by="high", **beside),
            figure.layer("line", y_by="mean", strokeWidth=1.5, **beside),
            figure.layer("point", y_by="mean", tip=(*tip, *ends), **beside),
        ],
        encoding=figure.by_series([arm.label for arm in arms], drawn),
    )
    x = figure.axis("batch size, sequences in the step", "size", labelAngle=0, grid=False)
    # The arms of a size stand close together, so that none seems to be at another size.
    x |= {"type": "ordinal", "sort": list(bins), "scale": {"padding": max(0.2, 1 - 0.05 * len(bins))}}
    rows = [row for label in drawn for row in batch_size_rows(label, *decodes[label], bins)]
    note = figure.clock_note(clock for run in runs for clock in run.run.columns.clocks)
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
        spec=figure.picture([panel], rows, x, legend=drawn),
    )


def bins_of(sizes: Integers) -> dict[str, tuple[int, int]]:
    """Lowest and highest of the batch sizes that are shown together, by label.

    A bin for each size when they are few, else powers of two: 1, 2, 3-4, 5-8, ...
    """
    distinct: list[int] = np.unique(sizes).tolist()
    if len(distinct) <= 12:
        return {str(size): (size, size) for size in distinct}
    highs = sorted({1 << max(0, size - 1).bit_length() for size in distinct})
    ends = [(high // 2 + 1 if high > 1 else min(1, distinct[0]), high) for high in highs]
    return {str(high) if low == high else f"{low}-{high}": (low, high) for low, high in ends}


def _decode_steps(arm: CellSummary, runs: Sequence[RunSummary]) -> tuple[Integers, Floats]:
    """Batch size and time in ms of every decode step of the arm's ``runs``."""
    columns = [run.run.columns for run in runs if run.label == arm.label]
    decodes = [each.in_phase("decode") for each in columns]
    sizes = [each.num_seqs[is_decode] for each, is_decode in zip(columns, decodes, strict=True)]
    times = [each.dur_ns[is_decode] / NS_PER_MS for each, is_decode in zip(columns, decodes, strict=True)]
    return np.concatenate([*sizes, np.array([], dtype=np.int64)]), np.concatenate([*times, np.array([])])


def batch_size_rows(
    label: str, sizes: Integers, times_ms: Floats, bins: Mapping[str, tuple[int, int]]
) -> Iterator[figure.Row]:
    """One row for each bin in which the arm has steps: their mean, and the 5th and 95th percentile."""
    for name, (least, most) in bins.items():
        part = times_ms[(least <= sizes) & (sizes <= most)]
        if len(part):
            low, high = np.percentile(part, (5, 95)).tolist()
            numbers = {"mean": float(part.mean()), "steps": len(part), "low": low, "high": high}
            yield {"arm": label, "size": name, **numbers}


CHARTS: Final = (draw_sections, draw_step_time, draw_batch_size, draw_flops)
"""In the order of the page."""
