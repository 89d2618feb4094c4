"""Acceptance of draft tokens by position, in two panels of a Plotly figure: survival and conditional acceptance."""

from collections.abc import Sequence
from typing import Final

from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.summary.arm_drafts import ArmDrafts
from benchctl.report.charts.arms import ArmStyle, arm_styles
from benchctl.report.page.charts import figure

_ID: Final = "acceptance"
_TITLE: Final = "Acceptance of draft tokens by position"
_PANEL_PX: Final = 210
_REST_PX: Final = 90
_TITLES: Final = ("Accepted up to this position, share of all drafts", "Accepted where the one before was")
_Point = tuple[int, float | None, Interval | None]


def draw_acceptance(source: figure.ChartSource) -> figure.Chart | None:
    """One line for each arm that drafted tokens, with the interval over its blocks at each position.

    None where no arm drafted any: then the page has nothing to say of it.
    """
    arms = [
        (arm, drafts)
        for arm in arm_styles(source.analysis)
        if (drafts := arm.cell.drafts()) is not None and drafts.positions
    ]
    if not arms:
        return None
    longest = max(len(drafts.positions) for _, drafts in arms)
    y_axis = figure.axis("share", range=[0, 1.05], tickformat=".2~f")
    x_axis = figure.axis("position in the draft", tickmode="linear", dtick=1, range=[0.5, longest + 0.5])
    height = _REST_PX + len(_TITLES) * _PANEL_PX + figure.legend_px(arm.label for arm, _ in arms)
    return figure.drawn(
        _ID,
        _TITLE,
        [trace for arm, drafts in arms for trace in _traces(arm, drafts)],
        figure.layout(
            height,
            **figure.panels(x_axis, [y_axis] * len(_TITLES), gap_frac=0.14),
            annotations=figure.panel_titles(_TITLES),
            margin={"l": 8, "r": 12, "t": 40, "b": 8},
        ),
        caption=(
            "Share of draft tokens that the target model accepted at each position, all usable runs of an arm "
            "together; bars are 95% intervals over its blocks."
        ),
        definition=(
            "Above: drafts accepted up to the position / all drafts. Below: the same / drafts accepted up to the "
            "position before. A draft that is shorter than others counts as rejected at the positions it lacks."
        ),
    )


def _traces(arm: ArmStyle, drafts: ArmDrafts) -> list[figure.Trace]:
    survival = [(at.pooled.position, at.pooled.survival, at.survival_interval) for at in drafts.positions]
    conditional = [(at.pooled.position, at.pooled.conditional, at.conditional_interval) for at in drafts.positions]
    return [_line(arm, survival, 0), _line(arm, conditional, 1)]


def _line(arm: ArmStyle, points: Sequence[_Point], panel: int) -> figure.Trace:
    shares = figure.rounded(share for _, share, _ in points)
    low = figure.rounded(None if interval is None else interval[0] for _, _, interval in points)
    high = figure.rounded(None if interval is None else interval[1] for _, _, interval in points)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": arm.label,
        "legendgroup": arm.label,
        "showlegend": panel == 0,
        "yaxis": figure.panel_axis(panel),
        "x": [position for position, _, _ in points],
        "y": shares,
        "line": {"color": arm.color, "dash": arm.dash, "width": 2},
        "marker": {"color": arm.color, "size": 7},
        "error_y": figure.error_bars(shares, low, high, arm.color),
        "hovertemplate": "position %{x}: %{y:.4~g}",
    }
