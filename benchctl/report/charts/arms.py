"""The arms and runs that charts draw; their deciding metrics block by block, and the acceptance of their draft
tokens.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Final

from benchctl.analysis.attribution.breakdown import CLOCK_NOTE
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.metrics.speculation import ArmDrafts
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.summary import CellSummary, RunSummary
from benchctl.profile.model import Profile
from benchctl.records.schema import Clock
from benchctl.report.charts import figure
from benchctl.report.charts.figure import MAX_SERIES

MAX_RUNS_BY_BLOCK: Final = 72
"""Charts of single runs hold no more than this, in whole blocks."""


def arms_of(analysis: AnalyzedExperiment) -> list[CellSummary]:
    """Every arm with a usable run, the baseline first, at most as many as can be told apart."""
    return [cell for cell in analysis.cells if cell.runs][:MAX_SERIES]


def runs_by_block(
    arms: Sequence[CellSummary], runs: Sequence[RunSummary], max_runs: int = MAX_RUNS_BY_BLOCK
) -> dict[int, list[RunSummary]]:
    """One of ``runs`` for each arm in each block; the first of the blocks that most belong to comes first.

    Where these are more than ``max_runs``, the other blocks are chosen at equal distances.
    """
    blocks = [run.record.block for run in runs]
    if not blocks:
        return {}
    first = max(sorted(set(blocks)), key=blocks.count)
    others = sorted(set(blocks) - {first})
    room = max(0, max_runs // len(arms) - 1)
    chosen = others if len(others) <= room else [others[i * len(others) // room] for i in range(room)]
    result = {}
    for block in (first, *chosen):
        by_label = {run.label: run for run in runs if run.record.block == block}
        result[block] = [by_label[arm.label] for arm in arms if arm.label in by_label]
    return result


def runs_with_steps(arms: Sequence[CellSummary]) -> list[RunSummary]:
    """The usable runs of these arms whose step log has steps after the warm-up and times whole steps."""
    runs = [run for arm in arms for run in arm.runs if run.record.times_whole_steps]
    return [run for run in runs if len(run.run.columns)]


def clock_note(clocks: Iterable[Clock]) -> str:
    """The clock of step times in a few words: ``device time``."""
    return ", ".join(CLOCK_NOTE[clock].split(",")[0] for clock in sorted(set(clocks)))


_ID: Final = "block-values"
_TITLE: Final = "Values block by block"
_MAX_TICKS: Final = 20
_MAX_LARGE: Final = 4
"""Markers of more arms would cover one another on a phone."""
_HIDDEN_FROM: Final = 5.0
_RELATIVE: Final = "in per cent from the mean of its arm, because the arms are far apart"
_SPREAD: Final = 0.6
"""Share of the distance between two blocks over which the arms of a block stand side by side."""
_CROSS: Final = "M-0.9,-0.9L0.9,0.9M0.9,-0.9L-0.9,0.9"


def draw_block_values(source: figure.ChartSource) -> figure.Chart:
    """A panel for each deciding metric. ``cells`` are comparisons with the baseline; they know the outliers."""
    analysis = source.analysis
    arms = arms_of(analysis)
    names = [
        name
        for name in deciding_names(analysis.profile)
        if any(run.number(name) is not None for arm in arms for run in arm.runs)
    ]
    if not names:
        return figure.Chart(id=_ID, title=_TITLE, skipped="no finished run knows a deciding metric")
    outliers = outlier_blocks(source.cells)
    rows = [row for name in names for row in _rows(name, arms, analysis.runs, outliers)]
    is_relative = any(_is_hidden(rows, name) for name in names)
    labels = [arm.label for arm in arms]
    kinds = {"counted": "circle", "outlier": "circle", "left out": _CROSS}
    of_kind = {"field": "kind", "type": "nominal", "legend": None}
    points = figure.layer(
        "point",
        y_by="percent" if is_relative else "value",
        shape_by={**of_kind, "scale": {"domain": list(kinds), "range": list(kinds.values())}},
        fillOpacity_by={"condition": {"test": "datum.kind === 'counted'", "value": 1}, "value": 0},
        stroke_by=figure.by_series(labels)["color"],
        strokeWidth=1.8,
        size=70 if len(arms) <= _MAX_LARGE else 34,
        tip=[("arm", "arm"), ("block", "block"), ("value", "value", ".5~g"), ("run", "run"), ("note", "")],
    )
    joints = figure.layer(
        "line",
        where="datum.kind !== 'left out'",
        y_by="percent" if is_relative else "value",
        detail_by={"field": "block"},
        color_by={"value": figure.GREY},
        strokeDash_by={"value": [1, 0]},
        strokeWidth=1,
    )
    blocks = sorted({run.record.block for run in analysis.runs})
    ticks: figure.Spec = {"values": blocks} if len(blocks) <= _MAX_TICKS else {}
    spec = figure.picture(
        [
            figure.panel(
                150,
                figure.axis(f"{name}, {'% from mean of the arm' if is_relative else METRICS[name].unit}"),
                [joints, points],
                where=(f"datum.metric === '{name}'",),
                encoding=figure.by_series(labels),
            )
            for name in names
        ],
        rows,
        figure.axis("block", "x", domain=(blocks[0] - 0.6, blocks[-1] + 0.6), format="d", grid=False, **ticks),
        legend=labels,
    )
    units = " and ".join(dict.fromkeys(METRICS[name].unit for name in names))
    origin = "a fresh server" if analysis.passes is None else "the replays of one pass"
    return figure.Chart(
        id=_ID,
        title=_TITLE,
        caption=(
            f"Each point is one run, {origin}, {_RELATIVE if is_relative else f'in {units}'}; a line "
            "joins the runs of one block. Open circles are outliers and count; crosses are left out."
        ),
        definition="; ".join(f"{name} = {METRICS[name].formula}" for name in names)
        + ". Only runs that failed, are suspect or damaged are left out.",
        spec=spec,
    )


def deciding_names(profile: Profile | None) -> tuple[str, ...]:
    """The primary metrics of the profile, those that are no counts; the default ones where it cannot be read."""
    names = Profile.model_fields["primary_metrics"].default if profile is None else profile.primary_metrics
    return tuple(name for name in names if name in METRICS and not METRICS[name].is_exact)


def outlier_blocks(cells: Sequence[CellComparison]) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """Blocks that stand out, by label of the compared arm and metric."""
    return {
        (cell.b_label, metric.metric.name): metric.outlier_blocks
        for cell in cells
        for metric in cell.metrics
        if metric.outlier_blocks
    }


def _rows(
    name: str,
    arms: Sequence[CellSummary],
    runs: Sequence[RunSummary],
    outliers: Mapping[tuple[str, str], tuple[int, ...]],
) -> Iterator[figure.Row]:
    """The values of one metric; ``percent`` is that of the geometric mean of those of the arm that count."""
    for i, arm in enumerate(arms):
        values = [
            (run, value) for run in runs if run.label == arm.label and (value := run.number(name)) is not None
        ]
        counted = [value for run, value in values if run.reason_excluded(name) is None]
        mean = geometric_mean(counted) if counted and min(counted) > 0 else None
        for run, value in values:
            block, reason = run.record.block, run.reason_excluded(name)
            is_outlier = block in outliers.get((arm.label, name), ())
            yield {
                "metric": name,
                "arm": arm.label,
                "block": block,
                "x": block + _SPREAD * ((i + 0.5) / len(arms) - 0.5),
                "value": value,
                "percent": None if mean is None else 100 * (value / mean - 1),
                "run": run.record.run_id,
                "kind": "left out" if reason is not None else "outlier" if is_outlier else "counted",
                "note": f"left out: {reason}" if reason is not None else "outlier" if is_outlier else "",
            }


def _is_hidden(rows: Sequence[figure.Row], name: str) -> bool:
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["metric"] == name:
            groups.setdefault(row["arm"], []).append(row["value"])
    return hides_scatter(list(groups.values()))


def hides_scatter(groups: Sequence[Sequence[float]]) -> bool:
    """True where arms differ so much that on one axis the scatter of each would be a flat line.

    That is when the values of all arms span more than five times what those of one arm do, in logarithms.
    """
    filled = [group for group in groups if group]
    if not filled or min(map(min, filled)) <= 0:
        return False
    widest = max(math.log(max(group) / min(group)) for group in filled)
    whole = math.log(max(map(max, filled)) / min(map(min, filled)))
    return 0 < widest < whole / _HIDDEN_FROM


_TITLES: Final = ("accepted up to this position, share of all drafts", "accepted where the one before was, share")


def draw_acceptance(source: figure.ChartSource) -> figure.Chart | None:
    """One line for each arm that drafted tokens, with the interval over its blocks at each position.

    None where no arm drafted any: then the page has nothing to say of it.
    """
    arms = arms_of(source.analysis)
    drafted = {arm.label: drafts for arm in arms if (drafts := arm.drafts()) is not None and drafts.positions}
    if not drafted:
        return None
    labels = [arm.label for arm in arms]
    longest = max(len(drafts.positions) for drafts in drafted.values())
    tip = (("arm", "arm"), ("position", "position"), ("share", "share", ".4~g"))
    spec = figure.picture(
        [
            figure.panel(
                180,
                figure.axis(title, domain=(0, 1.05), format=".2~f"),
                [
                    figure.layer("rule", y_by="low", y2_by="high"),
                    figure.layer("line", y_by="share"),
                    figure.layer("point", y_by="share", tip=tip),
                ],
                where=(f"datum.panel === {number}",),
                encoding=figure.by_series(labels, list(drafted)),
            )
            for number, title in enumerate(_TITLES)
        ],
        [row for label, drafts in drafted.items() for row in _acceptance_rows(label, drafts)],
        figure.axis("position in the draft", "position", domain=(0.5, longest + 0.5), tickMinStep=1, format="d"),
        legend=drafted,
    )
    return figure.Chart(
        id="acceptance",
        title="Acceptance of draft tokens by position",
        caption=(
            "Share of draft tokens that the target model accepted at each position, all usable runs of an arm "
            "together; bars are 95% intervals over its blocks."
        ),
        definition=(
            "Above: drafts accepted up to the position / all drafts. Below: the same / drafts accepted up to the "
            "position before. A draft that is shorter than others counts as rejected at the positions it lacks."
        ),
        spec=spec,
    )


def _acceptance_rows(label: str, drafts: ArmDrafts) -> Iterator[figure.Row]:
    for at in drafts.positions:
        for panel, (share, interval) in enumerate(
            ((at.survival, at.survival_interval), (at.conditional, at.conditional_interval))
        ):
            low, high = interval or (None, None)
            position = at.position
            yield {"arm": label, "panel": panel, "position": position, "share": share, "low": low, "high": high}
