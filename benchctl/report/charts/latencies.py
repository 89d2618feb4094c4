"""Distributions of latencies: for each arm the share of its requests that are at most so slow, and for each block.

Every line goes through quantiles at equal steps of the share, by the rule of the percentiles in the tables (rank
(n - 1) p, linear between neighbours), so a percentile can be read from it.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.summary.analyzed import LATENCY_NAMES, Sorted, run_latencies
from benchctl.report.charts import figure
from benchctl.report.charts.arms import arms_of

MAX_POINTS: Final = 300
"""Of the line of an arm; a percentile between two points is off by at most their distance."""
_MAX_BLOCK_POINTS: Final = 100
_MAX_POINTS_OF_BLOCKS: Final = 24_000
_LEAST_POINTS: Final = 20
_ID: Final = "latencies"
_TITLE: Final = "Latency distributions"
SECTION: Final = "latency"
NO_LATENCIES: Final = "no finished run has the times of its requests"

Blocks = Sequence[tuple[str, Mapping[str, Sorted]]]
"""Name of each block, and its ascending values by latency."""


def draw_latencies(source: figure.ChartSource) -> figure.Chart | None:
    """The distributions of all usable runs. None for forward passes, which have no requests."""
    if source.analysis.passes is not None:
        return None
    arms = [
        (arm.label, [(f"block {run.record.block}", run_latencies(run)) for run in arm.runs])
        for arm in arms_of(source.analysis)
    ]
    return draw_distributions(arms, unit="block")


def draw_distributions(arms: Sequence[tuple[str, Blocks]], unit: str) -> figure.Chart:
    """A thick line for each arm over all its blocks, a thin one for each; ``unit`` is the word for a block."""
    arms = arms[: figure.MAX_SERIES]
    labels = [label for label, _ in arms]
    names = [name for name in LATENCY_NAMES if any(name in values for _, blocks in arms for _, values in blocks)]
    if not names:
        return figure.Chart(id=_ID, title=_TITLE, skipped=NO_LATENCIES, section=SECTION)
    num_lines = sum(name in values for name in names for _, blocks in arms for _, values in blocks)
    most = max(_LEAST_POINTS, min(_MAX_BLOCK_POINTS, _MAX_POINTS_OF_BLOCKS // num_lines))
    rows = [row for name in names for label, blocks in arms for row in _rows(label, name, blocks, most)]
    latency = figure.Choice(
        name="latency",
        label="Latency",
        options=tuple((name, LATENCY_NAMES[name]) for name in names),
        selected="tpot" if "tpot" in names else names[0],
    )
    choices = (latency, figure.arm_choice(labels))
    tip = (("arm", "arm"), (unit, unit), ("ms", "at most, ms", ".4~g"), ("share", "share", ".1%"))
    rows = [{**row, unit: row["of"] or f"all {unit}s"} for row in rows]
    line: figure.Spec = {"y_by": "share", "detail_by": "of", "tip": tip}
    spec = figure.picture(
        [
            figure.panel(
                280,
                figure.axis("share at most so slow", domain=(0, 1), format="%"),
                [
                    figure.layer("line", where="datum.of !== ''", strokeWidth=0.8, opacity=0.45, **line),
                    figure.layer("line", where="datum.of === ''", strokeWidth=2.6, **line),
                ],
                where=("datum.latency === latency", figure.OF_ARM),
                encoding=figure.by_series(labels),
            )
        ],
        rows,
        figure.axis("latency, ms", "ms"),
        choices=choices,
        legend=labels,
    )
    return figure.Chart(
        id=_ID,
        title=_TITLE,
        caption=(
            f"Share of the completed requests (of gaps: of all gaps) with at most this latency in ms: a thick line "
            f"for each arm over all its {unit}s, a thin one for each {unit}."
        ),
        definition="; ".join(
            f"{name} = {METRICS[f'{name}_ms'].formula.removeprefix('mean of ')}" for name in names
        ),
        spec=spec,
        choices=choices,
        section=SECTION,
        has_log_switch=True,
    )


def _rows(label: str, name: str, blocks: Blocks, most: int) -> list[figure.Row]:
    """The points of the lines of one arm: ``of`` is the block, or nothing for all of them."""
    of_blocks = [(block, values[name]) for block, values in blocks if name in values]
    if not of_blocks:
        return []
    lines = [(block, quantiles(values, most)) for block, values in of_blocks if len(of_blocks) > 1]
    lines.append(("", quantiles(np.sort(np.concatenate([values for _, values in of_blocks])), MAX_POINTS)))
    return [
        {"latency": name, "arm": label, "of": block, "ms": ms, "share": share}
        for block, values in lines
        for ms, share in zip(values.tolist(), np.linspace(0, 1, len(values)).tolist(), strict=True)
    ]


def quantiles(values: Sorted, at_most: int) -> Sorted:
    """Quantiles of ascending values at equal steps from the smallest to the largest; all where they are few.

    A single value is given twice, as a step from 0 to 1.
    """
    if len(values) == 1:
        values = np.repeat(values, 2)
    if len(values) <= at_most:
        return values
    result: Sorted = np.interp(np.linspace(0, len(values) - 1, at_most), np.arange(len(values)), values)
    return result
