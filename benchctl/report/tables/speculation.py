"""The law of speculation and its load as tables and sentences.

Measured speculation beside the law, as a table and sentences.
"""

from collections.abc import Iterator
from typing import Final

from rich.table import Table

from benchctl.analysis.drafts import NEGLIGIBLE_FRAC, MeasuredSpeculation, SpeculativeArm
from benchctl.formats import UNKNOWN, change_of_ratio, count_of, four_digits, p_value, percentage
from benchctl.report.text.plain_table import plain_table
from benchctl.steptime.queueing import PredictedLoad
from benchctl.steptime.speculation.acceptance import LEVEL, Acceptance
from benchctl.steptime.speculation.draft_length import LONGEST, DraftLength, SpeculationLaw, WholeEstimate
from benchctl.steptime.speculation.estimate import Estimate
from benchctl.steptime.speculation.served import ServedSpeculation
from benchctl.units import MS_PER_S


def law_table(law: SpeculationLaw) -> Table:
    """A line for each draft length; a star marks those whose last position repeats an earlier acceptance."""
    title = f"Speculation with {acceptance_words(law.acceptance)}; {_cost_words(law)}"
    table = plain_table(
        title,
        (),
        (
            "draft tokens",
            "acceptance",
            "all accepted",
            "tokens/step",
            "without bonus",
            "ratio",
            "speed-up",
            "speed-up without",
            "rate",
            "efficiency",
            "backfill pays below",
            "break-even acceptance",
        ),
    )
    for length in law.lengths:
        table.add_row(*_law_cells(length))
    return table


def _law_cells(length: DraftLength) -> tuple[str, ...]:
    break_even = length.break_even_acceptance
    return (
        f"{length.num_draft_tokens}{'*' if length.is_extrapolated else ''}",
        with_interval(length.acceptance),
        four_digits(length.survival.value),
        with_interval(length.tokens),
        with_interval(length.tokens_without_bonus),
        four_digits(length.bonus_ratio.value),
        with_interval(length.speed_up),
        with_interval(length.speed_up_without_bonus),
        percentage(length.acceptance_rate.value),
        percentage(length.system_efficiency.value),
        percentage(length.backfill_limit.value),
        "none" if break_even is None else four_digits(break_even),
    )


def with_interval(estimate: Estimate) -> str:
    """``3.689 [3.512, 3.851]``, or the number alone where it has no interval."""
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return four_digits(estimate.value)
    return f"{four_digits(estimate.value)} [{four_digits(estimate.low)}, {four_digits(estimate.high)}]"


def acceptance_words(acceptance: Acceptance) -> str:
    """``acceptance 0.8 at every position``, the list, or the counts that it comes from."""
    if acceptance.counts:
        counts = ", ".join(f"{each.accepted}/{each.judged}" for each in acceptance.counts)
        return f"{counts} drafts accepted by position"
    values = ", ".join(f"{value:.4g}" for value in acceptance.values)
    return f"acceptance {values} {'at every position' if acceptance.is_constant else 'by position'}"


def _cost_words(law: SpeculationLaw) -> str:
    backfill = f", with bonus tokens {law.cost.backfill:.4g} more" if law.cost.backfill else ""
    return f"a step with K drafts costs 1 + {law.cost.draft:.4g} K steps without{backfill}"


def law_lines(law: SpeculationLaw) -> Iterator[str]:
    """The best and the longest draft that pays, the worth of the bonus token, and what was extrapolated."""
    server = "with bonus tokens" if law.bonus else "without bonus tokens"
    if not law.best.value:
        yield f"{server}, no number of draft tokens is faster than none"
    else:
        gain = with_interval(law.best_speed_up)
        are = "is" if law.best.value == 1 else "are"
        yield (
            f"{server}, {_drafts(law.best)} {are} best: {gain} times as fast as without speculation; "
            f"up to {_drafts(law.break_even)} are faster than none"
        )
    for length in law.lengths:
        slower = length.gain(bonus=law.bonus)
        if slower.value < 1 and (slower.high is None or slower.high < 1):
            share = percentage(1 - slower.value)
            yield f"{server}, a step with {_tokens(length)} yields {share} less per second than one without drafts"
    first = law.lengths[0]
    yield (
        f"at {_tokens(first)}, bonus tokens are worth "
        f"{percentage(first.bonus_ratio.value - 1)} more tokens per step: they pay unless their backfill costs "
        f"{percentage(first.backfill_limit.value)} of a step or more"
    )
    if any(length.is_extrapolated for length in law.lengths):
        yield f"* beyond position {len(law.acceptance.values)} its acceptance is repeated: an extrapolation"
    if law.acceptance.counts:
        yield f"[...] are intervals of {LEVEL:.0%}, if drafts are independent"


def _tokens(length: DraftLength) -> str:
    return count_of(length.num_draft_tokens, "draft token")


def _drafts(estimate: WholeEstimate) -> str:
    at_least = "at least " if estimate.value >= LONGEST else ""
    words = f"{at_least}{count_of(estimate.value, 'draft token')}"
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return words
    return f"{words} [{estimate.low}, {estimate.high}]"


def batch_table(served: ServedSpeculation) -> Table:
    """A line for each batch size: the step without drafts, the gain of each draft length, and the best of them."""
    lengths = [point.num_draft_tokens for point in served.batches[0].points if point.num_draft_tokens]
    title = f"Goodput over that without speculation, by batch size; {served.origin}"
    columns = ("batch", "step ms", *(f"K={num}" for num in lengths), "best K")
    table = plain_table(title, (), (*columns, "speed-up", "tokens/s", "TPOT ms", "drafting", "fits"))
    for batch in served.batches:
        best, plain = batch.best, batch.points[0]
        drafting = best.step.draft_s + best.step.backfill_s
        fits = served.memory_rows is None or batch.rows <= served.memory_rows
        table.add_row(
            str(batch.rows),
            four_digits(plain.step.total_s * MS_PER_S),
            *(four_digits(point.speed_up.value) for point in batch.points[1:]),
            str(best.num_draft_tokens) if best.num_draft_tokens else "off",
            with_interval(best.speed_up),
            with_interval(best.goodput_per_s),
            four_digits(best.tpot_s.value * MS_PER_S),
            percentage(drafting / best.step.total_s),
            "" if fits else "no",
        )
    return table


def batch_lines(served: ServedSpeculation) -> Iterator[str]:
    """The batches at which each draft length pays, and the crossover."""
    for num, ends in served.paying:
        words = count_of(num, "draft token")
        if ends is None:
            yield f"{words}: at no batch up to {served.most_rows}"
            continue
        low, high = ends
        until = f"at every batch up to {high}" if high >= served.most_rows else f"up to a batch of {high}"
        yield f"{words}: faster than none {f'from a batch of {low} on, ' if low > 1 else ''}{until}"
    if served.largest_paying and served.largest_paying < served.most_rows:
        yield f"beyond a batch of {served.largest_paying} speculation costs more than it gains"
    if served.memory_rows is not None:
        yield (
            f"{count_of(served.memory_rows, 'sequence')} of {served.context:.0f} tokens fit into the memory beside "
            "the weights"
        )


def rate_table(served: ServedSpeculation) -> Table:
    """A line for each rate of requests: without speculation, and with the best number of draft tokens."""
    title = "Requests that arrive at random: without speculation, and with the draft tokens of the shortest request"
    table = plain_table(
        title,
        (),
        (
            "requests/s",
            "batch",
            "TPOT ms",
            "request s",
            "of most",
            "best K",
            "batch",
            "TPOT ms",
            "request s",
            "of most",
        ),
    )
    for rate in served.rates:
        best, load = rate.best
        cells = [_load_cells(each) for each in (rate.without, load)]
        table.add_row(f"{rate.rate_per_s:g}", *cells[0], str(best) if best else "off", *cells[1])
    return table


def _load_cells(load: PredictedLoad) -> tuple[str, ...]:
    latency = (UNKNOWN, UNKNOWN) if load.is_saturated else (load.tpot_s * MS_PER_S, load.e2el_s)
    words = [each if isinstance(each, str) else four_digits(each) for each in latency]
    return (four_digits(load.batch), *words, percentage(load.utilisation))


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
