"""Measured speculation beside the law, as a table and sentences."""

from collections.abc import Iterator
from typing import Final

from rich.table import Table

from benchctl.analysis.summary.speculation import NEGLIGIBLE_FRAC, MeasuredSpeculation, SpeculativeArm
from benchctl.formats import UNKNOWN, change_of_ratio, count_of, p_value, percentage
from benchctl.report.text.plain_table import plain_table
from benchctl.report.text.speculation import with_interval
from benchctl.steptime.speculation.estimate import Estimate

_SIGNIFICANT: Final = 0.05
_NEGLIGIBLE: Final = percentage(NEGLIGIBLE_FRAC)


def measured_table(measured: MeasuredSpeculation) -> Table:
    """A line for each arm that drafts: law and measurement of tokens, time and speed-up, and their differences."""
    title = "Law against measurement"
    if measured.baseline is not None:
        title += f"; steps and speed-ups are those of decoding, over {measured.baseline}"
    table = plain_table(
        title,
        ("arm",),
        (
            "K",
            "bonus",
            "blocks",
            "drafts",
            "tokens/step law",
            "measured",
            "difference",
            "step law",
            "measured",
            "speed-up law",
            "measured",
            "difference",
            "by TPOT",
        ),
    )
    for arm in measured.arms:
        table.add_row(*_cells(measured, arm))
    return table


def _cells(measured: MeasuredSpeculation, arm: SpeculativeArm) -> tuple[str, ...]:
    return (
        arm.label,
        str(arm.num_draft_tokens),
        "yes" if arm.bonus else "no",
        str(arm.num_blocks),
        str(arm.counts.drafts),
        with_interval(arm.expected_tokens),
        _or_unknown(arm.measured_tokens),
        _difference(arm.expected_tokens, arm.measured_tokens, measured.tokens_agree(arm)),
        _or_unknown(arm.expected_step),
        _or_unknown(arm.measured_step),
        _or_unknown(arm.expected_speed_up),
        _or_unknown(arm.measured_speed_up),
        _difference(arm.expected_speed_up, arm.measured_speed_up, measured.speed_up_agrees(arm)),
        _or_unknown(arm.tpot_speed_up),
    )


def _or_unknown(each: Estimate | None) -> str:
    return UNKNOWN if each is None else with_interval(each)


def _difference(expected: Estimate | None, measured: Estimate | None, is_agreed: bool | None) -> str:
    """``+0.3%``, with ``!`` where it is more than the intervals allow."""
    if expected is None or measured is None:
        return UNKNOWN
    mark = "!" if is_agreed is False else ""
    return f"{change_of_ratio(measured.value / expected.value)}{mark}"


def measured_lines(measured: MeasuredSpeculation) -> Iterator[str]:
    """Agreement, fitted costs, and what the counts leave out."""
    arms = measured.arms
    for words, verdicts in (
        ("tokens per step", [measured.tokens_agree(arm) for arm in arms]),
        ("speed-up", [measured.speed_up_agrees(arm) for arm in arms]),
    ):
        judged = [verdict for verdict in verdicts if verdict is not None]
        if judged:
            agreeing = f"{sum(judged)} of {count_of(len(judged), 'arm')}"
            yield f"{words}: law and measurement agree within their intervals, or {_NEGLIGIBLE}, in {agreeing}"
    if measured.costs is not None:
        backfill = measured.costs.backfill
        also = "" if backfill is None else f", bonus tokens {_share(backfill)}"
        yield f"fitted to decoding steps: one more draft token adds {_share(measured.costs.draft)} of a step{also}"
    else:
        yield "no baseline without drafts: time per step and speed-up are unknown"
    if measured.same_everywhere_p is not None:
        fits = "fits" if measured.same_everywhere_p >= _SIGNIFICANT else "does not fit"
        yield f"one acceptance for every position {fits} these counts ({_p(measured.same_everywhere_p)})"
    if measured.same_in_arms_p is not None and measured.same_in_arms_p < _SIGNIFICANT:
        yield (
            f"the acceptance of a position differs between arms ({_p(measured.same_in_arms_p)}), as where requests "
            "differ and those that accept little take most of the drafts: the pooled law is then too high for long "
            "drafts"
        )
    shorter = [arm for arm in arms if not arm.counts.is_exact]
    for arm in shorter:
        yield (
            f"{arm.label}: {percentage(1 - arm.counts.whole_frac)} of the drafts are in steps with shorter drafts, "
            "whose missing tokens count as rejected: acceptance by position is a lower bound"
        )


def _p(probability: float) -> str:
    words = p_value(probability)
    return f"p {words}" if words.startswith("<") else f"p = {words}"


def _share(each: Estimate) -> str:
    if each.low is None or each.high is None:
        return percentage(each.value)
    return f"{percentage(each.value)} [{percentage(each.low)}, {percentage(each.high)}]"
