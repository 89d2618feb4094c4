"""Acceptance of draft tokens by position: survival, and acceptance where the position before was accepted."""

from collections.abc import Iterator
from typing import Final

from benchctl.analysis.metrics.speculation import ArmDrafts
from benchctl.report.charts import figure
from benchctl.report.charts.arms import arms_of

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
        [row for label, drafts in drafted.items() for row in _rows(label, drafts)],
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


def _rows(label: str, drafts: ArmDrafts) -> Iterator[figure.Row]:
    for at in drafts.positions:
        for panel, (share, interval) in enumerate(
            ((at.pooled.survival, at.survival_interval), (at.pooled.conditional, at.conditional_interval))
        ):
            low, high = interval or (None, None)
            position = at.pooled.position
            yield {"arm": label, "panel": panel, "position": position, "share": share, "low": low, "high": high}
