"""Tables and sentences of models: the law of speculation beside its measurement, and step time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchctl.analysis.experiment.drafts import NEGLIGIBLE_FRAC, MeasuredSpeculation
from benchctl.analysis.metrics.run import ArmDrafts, PositionAcceptance
from benchctl.report.table import Column, Table, table_of
from benchctl.steptime.diagnose import Diagnosis
from benchctl.steptime.evaluate import Accuracy, Evaluation
from benchctl.steptime.features import COUNTS
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.speculation_law import LEVEL, LONGEST, Acceptance, Estimate, SpeculationLaw, WholeEstimate
from benchctl.steptime.speculation_load import ServedSpeculation
from benchctl.steptime.work import EXTENTS, StepWork, distances, extents_of
from benchctl.units import (
    MS_PER_S,
    UNKNOWN,
    change_of_ratio,
    count_of,
    four_digits,
    p_value,
    percentage,
    three_digits,
    whole,
)


def acceptance_table(arms: Mapping[str, ArmDrafts]) -> Table | None:
    """Every arm that drafted tokens, with as many positions as the longest drafts have; None where none did."""
    if not arms:
        return None
    title = (
        "Acceptance of draft tokens; by position: share of all drafts accepted up to it (in brackets of those "
        "accepted up to the position before)"
    )
    num_positions = max(len(drafts.positions) for drafts in arms.values())
    columns = (
        Column("arm", "cell", is_left=True),
        Column("drafts", "drafts", whole),
        Column("draft_tokens", "draft tokens", whole),
        Column("accepted_tokens", "accepted", whole),
        Column("acceptance_rate", "rate", three_digits),
        Column("acceptance_length", "length", three_digits),
        *(Column(f"{number}", f"position {number}", _share_of_drafts) for number in range(1, num_positions + 1)),
    )
    rows = (
        {"arm": arm, **drafts.counts.metrics}
        | {f"{number}": position for number, position in enumerate(drafts.positions, start=1)}
        for arm, drafts in arms.items()
    )
    return Table(title, columns, tuple(rows))


def _share_of_drafts(at: PositionAcceptance) -> str:
    """``0.512 (0.800)``; the first position has no other before it."""
    survival = UNKNOWN if at.survival is None else three_digits(at.survival)
    if at.position == 1 or at.conditional is None:
        return survival
    return f"{survival} ({three_digits(at.conditional)})"


def law_table(law: SpeculationLaw) -> Table:
    """A line for each draft length; a star marks those whose last position repeats an earlier acceptance."""
    estimates = (
        Column("acceptance", "acceptance", with_interval),
        Column("survival", "all accepted", lambda each: four_digits(each.value)),
        Column("tokens", "tokens/step", with_interval),
        Column("tokens_without_bonus", "without bonus", with_interval),
        Column("bonus_ratio", "ratio", lambda each: four_digits(each.value)),
        Column("speed_up", "speed-up", with_interval),
        Column("speed_up_without_bonus", "speed-up without", with_interval),
        Column("acceptance_rate", "rate", lambda each: percentage(each.value)),
        Column("system_efficiency", "efficiency", lambda each: percentage(each.value)),
        Column("backfill_limit", "backfill pays below", lambda each: percentage(each.value)),
    )
    rows = (
        {column.key: getattr(length, column.key) for column in estimates}
        | {
            "num": f"{length.num_draft_tokens}{'*' if length.is_extrapolated else ''}",
            "break_even": "none" if (even := length.break_even_acceptance) is None else four_digits(even),
        }
        for length in law.lengths
    )
    columns = (Column("num", "draft tokens"), *estimates, Column("break_even", "break-even acceptance"))
    backfill = f", with bonus tokens {law.cost.backfill:.4g} more" if law.cost.backfill else ""
    cost = f"a step with K drafts costs 1 + {law.cost.draft:.4g} K steps without{backfill}"
    return Table(f"Speculation with {acceptance_words(law.acceptance)}; {cost}", columns, tuple(rows))


def with_interval(estimate: Estimate, text: Callable[[float], str] = four_digits) -> str:
    """``3.689 [3.512, 3.851]``, or the number alone where it has no interval."""
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return text(estimate.value)
    return f"{text(estimate.value)} [{text(estimate.low)}, {text(estimate.high)}]"


def acceptance_words(acceptance: Acceptance) -> str:
    """``acceptance 0.8 at every position``, the list, or the counts that it comes from."""
    if acceptance.counts:
        counts = ", ".join(f"{each.accepted}/{each.judged}" for each in acceptance.counts)
        return f"{counts} drafts accepted by position"
    values = ", ".join(f"{value:.4g}" for value in acceptance.values)
    return f"acceptance {values} {'at every position' if acceptance.is_constant else 'by position'}"


def law_lines(law: SpeculationLaw) -> Iterator[str]:
    """The best and the longest draft that pays, the worth of the bonus token, and what was extrapolated."""
    server = "with bonus tokens" if law.bonus else "without bonus tokens"
    are = "is" if law.best.value == 1 else "are"
    yield (
        f"{server}, {_drafts(law.best)} {are} best: {with_interval(law.best_speed_up)} times as fast as without "
        f"speculation; up to {_drafts(law.break_even)} are faster than none"
        if law.best.value
        else f"{server}, no number of draft tokens is faster than none"
    )
    for length in law.lengths:
        slower, tokens = length.gain(bonus=law.bonus), count_of(length.num_draft_tokens, "draft token")
        if slower.value < 1 and (slower.high is None or slower.high < 1):
            less = f"{percentage(1 - slower.value)} less per second than one without drafts"
            yield f"{server}, a step with {tokens} yields {less}"
    first = law.lengths[0]
    yield (
        f"at {count_of(first.num_draft_tokens, 'draft token')}, bonus tokens are worth "
        f"{percentage(first.bonus_ratio.value - 1)} more tokens per step: they pay unless their backfill costs "
        f"{percentage(first.backfill_limit.value)} of a step or more"
    )
    if any(length.is_extrapolated for length in law.lengths):
        yield f"* beyond position {len(law.acceptance.values)} its acceptance is repeated: an extrapolation"
    if law.acceptance.counts:
        yield f"[...] are intervals of {LEVEL:.0%}, if drafts are independent"


def _drafts(estimate: WholeEstimate) -> str:
    at_least = "at least " if estimate.value >= LONGEST else ""
    words = f"{at_least}{count_of(estimate.value, 'draft token')}"
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return words
    return f"{words} [{estimate.low}, {estimate.high}]"


def batch_table(served: ServedSpeculation) -> Table:
    """A line for each batch size: the step without drafts, the gain of each draft length, and the best of them."""
    lengths = [point.num_draft_tokens for point in served.batches[0].points if point.num_draft_tokens]
    columns = ("batch", "step ms", *(f"K={num}" for num in lengths), "best K")
    rows = (
        (
            batch.rows,
            four_digits(batch.points[0].step.total_s * MS_PER_S),
            *(four_digits(point.speed_up.value) for point in batch.points[1:]),
            batch.best.num_draft_tokens or "off",
            with_interval(batch.best.speed_up),
            with_interval(batch.best.goodput_per_s),
            four_digits(batch.best.tpot_s.value * MS_PER_S),
            percentage((batch.best.step.draft_s + batch.best.step.backfill_s) / batch.best.step.total_s),
            "" if served.memory_rows is None or batch.rows <= served.memory_rows else "no",
        )
        for batch in served.batches
    )
    title = f"Goodput over that without speculation, by batch size; {served.origin}"
    return table_of((*columns, "speed-up", "tokens/s", "TPOT ms", "drafting", "fits"), rows, title=title)


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
    names = ("batch", "TPOT ms", "request s", "of most")
    columns = (
        Column("rate", "requests/s", lambda rate: f"{rate:g}"),
        *(Column(f"plain {name}", name) for name in names),
        Column("best", "best K", lambda best: str(best or "off")),
        *(Column(f"best {name}", name) for name in names),
    )
    rows = []
    for rate in served.rates:
        row: dict[str, Any] = {"rate": rate.rate_per_s, "best": rate.best[0]}
        for which, load in (("plain", rate.without), ("best", rate.best[1])):
            latency = (None, None) if load.is_saturated else (load.tpot_s * MS_PER_S, load.e2el_s)
            texts = (four_digits(load.batch), *map(four_digits, latency), percentage(load.utilisation))
            row |= {f"{which} {name}": text for name, text in zip(names, texts, strict=True)}
        rows.append(row)
    title = "Requests that arrive at random: without speculation, and with the draft tokens of the shortest request"
    return Table(title, columns, tuple(rows))


def measured_table(measured: MeasuredSpeculation) -> Table:
    """A line for each arm that drafts: law and measurement of tokens, time and speed-up, and their differences."""
    title = "Law against measurement"
    if measured.baseline is not None:
        title += f"; steps and speed-ups are those of decoding, over {measured.baseline}"
    columns = (
        Column("label", "arm", is_left=True),
        Column("num_draft_tokens", "K"),
        Column("bonus", "bonus", lambda bonus: "yes" if bonus else "no"),
        Column("num_blocks", "blocks"),
        Column("counts", "drafts", lambda counts: str(counts.drafts)),
        Column("expected_tokens", "tokens/step law", with_interval),
        Column("measured_tokens", "measured", with_interval),
        Column("tokens_difference", "difference"),
        Column("expected_step", "step law", with_interval),
        Column("measured_step", "measured", with_interval),
        Column("expected_speed_up", "speed-up law", with_interval),
        Column("measured_speed_up", "measured", with_interval),
        Column("speed_up_difference", "difference"),
        Column("tpot_speed_up", "by TPOT", with_interval),
    )
    rows = []
    for arm in measured.arms:
        row = {
            "tokens_difference": _difference(arm.expected_tokens, arm.measured_tokens, arm.tokens_agree),
            "speed_up_difference": _difference(arm.expected_speed_up, arm.measured_speed_up, arm.speed_up_agrees),
        }
        rows.append({c.key: getattr(arm, c.key) for c in columns if c.key not in row} | row)
    return Table(title, columns, tuple(rows))


def _difference(expected: Estimate | None, measured: Estimate | None, is_agreed: bool | None) -> str | None:
    """``+0.3%``, with ``!`` where it is more than the intervals allow."""
    if expected is None or measured is None:
        return None
    mark = "!" if is_agreed is False else ""
    return f"{change_of_ratio(measured.value / expected.value)}{mark}"


def measured_lines(measured: MeasuredSpeculation) -> Iterator[str]:
    """Agreement, fitted costs, and what the counts leave out."""
    arms = measured.arms
    for words, verdicts in (
        ("tokens per step", [arm.tokens_agree for arm in arms]),
        ("speed-up", [arm.speed_up_agrees for arm in arms]),
    ):
        judged = [verdict for verdict in verdicts if verdict is not None]
        if judged:
            within = f"within their intervals, or {percentage(NEGLIGIBLE_FRAC)}"
            yield f"{words}: law and measurement agree {within}, in {sum(judged)} of {count_of(len(judged), 'arm')}"
    costs, everywhere_p = measured.costs, measured.same_everywhere_p
    if costs is not None:
        backfill = costs.backfill
        also = "" if backfill is None else f", bonus tokens {with_interval(backfill, percentage)}"
        draft = with_interval(costs.draft, percentage)
        yield f"fitted to decoding steps: one more draft token adds {draft} of a step{also}"
    else:
        yield "no baseline without drafts: time per step and speed-up are unknown"
    if everywhere_p is not None:
        fits = "fits" if everywhere_p >= 0.05 else "does not fit"
        yield f"one acceptance for every position {fits} these counts ({_p(everywhere_p)})"
    if measured.same_in_arms_p is not None and measured.same_in_arms_p < 0.05:
        yield (
            f"the acceptance of a position differs between arms ({_p(measured.same_in_arms_p)}), as where requests "
            "differ and those that accept little take most of the drafts: the pooled law is then too high for long "
            "drafts"
        )
    for arm in (arm for arm in arms if not arm.counts.is_exact):
        yield (
            f"{arm.label}: {percentage(1 - arm.counts.whole_frac)} of the drafts are in steps with shorter drafts, "
            "whose missing tokens count as rejected: acceptance by position is a lower bound"
        )


def _p(probability: float) -> str:
    words = p_value(probability)
    return f"p {words}" if words.startswith("<") else f"p = {words}"


def coefficient_table(model: StepTimeModel) -> Table:
    """Every coefficient with its 90 % interval; one that the data do not determine says so."""
    title = "Coefficients: factors on the time at the data sheet's peaks, or microseconds for each"
    rows = (
        (
            each.name,
            each.unit or "factor",
            four_digits(each.value),
            None
            if each.low is None or each.high is None
            else f"{four_digits(each.low)} to {four_digits(each.high)}",
            "" if each.is_identified else "typical, not measured",
        )
        for each in model.coefficients
    )
    return table_of(("feature", "unit", "value", "90% interval", ""), rows, left=("feature", "unit"), title=title)


def accuracy_table(title: str, first: str, rows: Iterable[tuple[str, Accuracy]]) -> Table:
    """A line of errors for each label."""
    columns = (
        Column("label", first, is_left=True),
        Column("num_steps", "steps"),
        Column("mape_frac", "MAPE", lambda frac: f"{frac:.2%}"),
        Column("bias_frac", "bias", lambda frac: f"{frac:+.2%}"),
        Column("p90_frac", "p90", lambda frac: f"{frac:.2%}"),
        Column("coverage_frac", "in 90% interval", lambda frac: f"{frac:.1%}"),
    )
    values = ({c.key: getattr(each, c.key) for c in columns[1:]} | {"label": label} for label, each in rows)
    return Table(title, columns, tuple(values))


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """Each structure on all groups left out, then the groups of the first; of many only the eight worst."""
    judged = evaluations[0]
    rows: list[tuple[str, Accuracy]] = [(evaluation.structure, evaluation.whole) for evaluation in evaluations]
    worst = sorted(judged.groups, key=lambda group: -group.mape_frac)[:8]
    groups = judged.groups if len(judged.groups) <= 8 else worst
    rows += [(f"  {judged.structure}, without {group.label}", group) for group in groups]
    what = f"each {judged.by} predicted by a fit to the others"
    return accuracy_table(f"Errors on steps that the fit did not see: {what}", "structure", rows)


def bucket_table(buckets: dict[str, tuple[Accuracy, ...]]) -> Table:
    """Errors by model, tensor-parallel size, phase, batch and context."""
    rows = [(f"{kind}: {accuracy.label}", accuracy) for kind, group in buckets.items() for accuracy in group]
    return accuracy_table("Where the errors are", "steps of", rows)


def column_table(diagnosis: Diagnosis) -> Table:
    """Share of each feature in the step time, and its collinearity."""
    rows = (
        (
            column.name,
            None if column.name in COUNTS else f"{column.share_frac:.1%}",
            f"{column.vif:.3g}",
            "constant in each deployment" if column.is_constant else "",
        )
        for column in diagnosis.columns
    )
    title = f"Features: condition number {diagnosis.condition:.3g}"
    return table_of(("feature", "share at peak", "VIF", ""), rows, left=("feature",), title=title)


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Health checks that did not pass, and the runs to add, as sentences."""
    for check in diagnosis.checks:
        yield f"{check.kind}: {check.where}: {check.message}; {check.remedy} [{check.code}]"
    if diagnosis.is_finished:
        is_typical = any(check.code == "not-identified" for check in diagnosis.checks)
        rest = "what is typical and not measured is noted above" if is_typical else "coefficients are determined"
        yield f"no check warns: errors are small; {rest}"
    if not diagnosis.runs_to_add:
        yield "no run of these models and devices would determine the coefficients much better"


def run_table(diagnosis: Diagnosis) -> Table:
    """The runs to add next, the most useful first."""
    rows = (
        (
            run.model or "any",
            run.reason,
            run.tensor_parallel or 1,
            run.prompt_tokens,
            run.output_tokens,
            run.concurrency,
        )
        for run in diagnosis.runs_to_add
    )
    headings = ("model", "because", "TP", "prompt", "output", "concurrency")
    return table_of(headings, rows, left=("model", "because"), title="Runs to add")


def outside_words(model: StepTimeModel, work: StepWork) -> list[str]:
    """Each extent of a step that lies outside of the range of the fit, with this range."""
    extents = extents_of(work)
    rows = zip(EXTENTS, extents[0], *model.fitted_range, distances(extents, model.fitted_range)[0], strict=True)
    return [
        f"{x:.4g} {name}, fitted {f'{low:.4g} to {high:.4g}' if high else 'to steps without'}"
        for name, x, low, high, distance in rows
        if distance > 0
    ]


def source_lines(model: StepTimeModel, skipped: Sequence[str]) -> Iterator[str]:
    """The data behind a model, and whatever of it was not used."""
    provenance = model.provenance
    sizes = ", ".join(f"TP{size}" for size in model.tensor_parallel)
    yield (
        f"{model.structure}: {count_of(provenance.num_steps, 'step')} of {count_of(len(provenance.runs), 'run')}, "
        f"{' and '.join(provenance.models)}, {sizes} on {model.hardware}"
    )
    for reason, number in provenance.steps_left_out:
        yield f"left out: {count_of(number, 'step')}, {reason}"
    for line in skipped:
        yield f"not used: {line}"
