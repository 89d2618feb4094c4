"""Tables of a step-time model: coefficients, errors on unseen runs, health, and the runs to add."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.table import Table

from benchctl.formats import UNKNOWN, count_of, four_digits
from benchctl.report.text.plain_table import plain_table
from benchctl.steptime.diagnosis.diagnose import Diagnosis
from benchctl.steptime.diagnosis.evaluate import Evaluation
from benchctl.steptime.diagnosis.predictions import Accuracy
from benchctl.steptime.features import COUNTS
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.step_counts import EXTENTS, distances, extents_of
from benchctl.steptime.structure import Coefficient
from benchctl.steptime.work import StepWork

_MAX_GROUPS: Final = 8
"""Groups of a hold-out that a table shows."""


def coefficient_table(model: StepTimeModel) -> Table:
    """Every coefficient with its 90 % interval; one that the data do not determine says so."""
    title = "Coefficients: factors on the time at the data sheet's peaks, or microseconds for each"
    table = plain_table(title, ("feature", "unit"), ("value", "90% interval", ""))
    for coefficient in model.coefficients:
        note = "" if coefficient.is_identified else "typical, not measured"
        unit = coefficient.unit or "factor"
        table.add_row(coefficient.name, unit, four_digits(coefficient.value), _interval(coefficient), note)
    return table


def _interval(coefficient: Coefficient) -> str:
    if coefficient.low is None or coefficient.high is None:
        return UNKNOWN
    return f"{four_digits(coefficient.low)} to {four_digits(coefficient.high)}"


def accuracy_table(title: str, first: str, rows: Sequence[tuple[str, Accuracy]]) -> Table:
    """A line of errors for each label."""
    table = plain_table(title, (first,), ("steps", "MAPE", "bias", "p90", "in 90% interval"))
    for label, accuracy in rows:
        table.add_row(label, str(accuracy.num_steps), *_errors(accuracy))
    return table


def _errors(accuracy: Accuracy) -> tuple[str, ...]:
    return (
        f"{accuracy.mape_frac:.2%}",
        f"{accuracy.bias_frac:+.2%}",
        f"{accuracy.p90_frac:.2%}",
        f"{accuracy.coverage_frac:.1%}",
    )


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """Each structure on all groups left out, then the groups of the first; of many only the worst."""
    judged = evaluations[0]
    rows: list[tuple[str, Accuracy]] = [(evaluation.structure, evaluation.whole) for evaluation in evaluations]
    worst = sorted(judged.groups, key=lambda group: -group.mape_frac)[:_MAX_GROUPS]
    groups = judged.groups if len(judged.groups) <= _MAX_GROUPS else worst
    rows += [(f"  {judged.structure}, without {group.label}", group) for group in groups]
    what = f"each {judged.by} predicted by a fit to the others"
    return accuracy_table(f"Errors on steps that the fit did not see: {what}", "structure", rows)


def bucket_table(buckets: dict[str, tuple[Accuracy, ...]]) -> Table:
    """Errors by model, tensor-parallel size, phase, batch and context."""
    rows = [(f"{kind}: {accuracy.label}", accuracy) for kind, group in buckets.items() for accuracy in group]
    return accuracy_table("Where the errors are", "steps of", rows)


def column_table(diagnosis: Diagnosis) -> Table:
    """Share of each feature in the step time, and its collinearity."""
    title = f"Features: condition number {diagnosis.condition:.3g}"
    table = plain_table(title, ("feature",), ("share at peak", "VIF", ""))
    for column in diagnosis.columns:
        note = "constant in each deployment" if column.is_constant else ""
        share = UNKNOWN if column.name in COUNTS else f"{column.share_frac:.1%}"
        table.add_row(column.name, share, f"{column.vif:.3g}", note)
    return table


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Health checks that did not pass, regions of the design, and the runs to add, as sentences."""
    for check in diagnosis.checks:
        yield f"{check.kind}: {check.where}: {check.message}; {check.remedy} [{check.code}]"
    for region in diagnosis.gaps:
        yield (
            f"gap: {region.label} has {region.steps_frac:.1%} of the steps and {region.leverage_frac:.0%} of the "
            "leverage: a few steps decide coefficients"
        )
    for region in diagnosis.redundant:
        yield (
            f"redundant: {region.label} has {region.steps_frac:.0%} of the steps and {region.leverage_frac:.0%} of "
            "the leverage: more like these tell little"
        )
    if diagnosis.is_finished:
        is_typical = any(check.code == "not-identified" for check in diagnosis.checks)
        rest = "what is typical and not measured is noted above" if is_typical else "coefficients are determined"
        yield f"no check warns: errors are small; {rest}"
    if not diagnosis.runs_to_add:
        yield "no run of these models and devices would determine the coefficients much better"


def run_table(diagnosis: Diagnosis) -> Table:
    """The runs to add next, the most useful first."""
    table = plain_table("Runs to add", ("model", "because"), ("TP", "prompt", "output", "concurrency"))
    for run in diagnosis.runs_to_add:
        numbers = (run.tensor_parallel or 1, run.prompt_tokens, run.output_tokens, run.concurrency)
        table.add_row(run.model or "any", run.reason, *map(str, numbers))
    return table


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
