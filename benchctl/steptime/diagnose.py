"""Health of a fitted step-time model, and the runs that would make it better.

The checks are those of the published model's protocol, with its thresholds. Non-negative least squares never gives
a coefficient below 0: such a one is reported as held at its bound, with the value that it would have without.

Runs to add are a greedy choice from a grid of possible ones. Each has requests of one shape at one concurrency, and
so a known mix of steps. What it would add to the design is a sum of squares that needs no measurement, because it
depends on the work alone; the expected gain is the fall in the sum of the coefficients' variances, each in units
of its anchor's spread (A-optimal design with the anchors as prior). The run with the largest gain in its predicted
time is chosen. Runs are chosen one after another: the second counts what the first would have told.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Literal, TypeAlias

import numpy as np

from benchctl.steptime.design import (
    ColumnDiagnosis,
    Design,
    condition_number,
    diagnose_columns,
    fitted_design,
    relative_rows,
)
from benchctl.steptime.evaluate import Accuracy, Evaluation, buckets, predict_runs
from benchctl.steptime.fit import FitOptions, anchor_of, fit_to
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.queueing import kv_capacity_tokens
from benchctl.steptime.work import Coefficient, Floats, ObservedSteps, StepWork, stacked
from benchctl.units import US_PER_S

PROMPTS: Final = (128, 512, 2048, 8192)
OUTPUTS: Final = (1, 64, 256)
CONCURRENCY: Final = (1, 8, 32, 128)
_STEPS_OF_RUN: Final = 200
"""Steps by which a candidate is described; it is credited with as many as it has."""
_NOISE_FRAC: Final = 0.03
"""Error of a single step that is assumed where the data have less."""
MAX_FACTOR: Final = 5.0
MAX_RELATIVE_WIDTH: Final = 2.0
MAX_BUCKET_MAPE: Final = 0.15
MAX_MAPE: Final = 0.10
MAX_CONDITION: Final = 1000.0
MAX_CV: Final = 0.5
ENOUGH_CV: Final = 0.3
_WIDTH_REMEDIES: Final = {
    "static_weights": "add a model of another size",
    "all_reduce": "add runs at another tensor-parallel size",
    "requests": "add long prompts at low concurrency",
}
_ADD_LISTED: Final = "add the runs listed below"


def num_requests(concurrency: int) -> int:
    """Requests of a run: twice as many as are open, and at least four."""
    return max(4, 2 * concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunToAdd:
    """Requests of one shape at one concurrency, and the reason to measure them.

    ``prompt_tokens`` and ``output_tokens`` are those of every request, and all prompts differ; ``concurrency``
    requests are open at a time. ``model`` and ``tensor_parallel`` are None where any will do.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    reason: str
    coefficients: tuple[str, ...] = ()
    """The coefficients that this run determines better."""
    model: str | None = None
    tensor_parallel: int | None = None


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One condition that a model does not meet: where, what it shows, and what to do."""

    code: str
    where: str
    message: str
    remedy: str
    kind: Literal["warning", "note"] = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Health checks that did not pass, and the runs to add next.

    ``is_finished`` says that no check warns: every factor within bounds, errors on unseen groups and in every
    bucket small enough. Coefficients may still be typical values, which ``runs_to_add`` would determine.
    """

    condition: float
    columns: tuple[ColumnDiagnosis, ...]
    checks: tuple[HealthCheck, ...]
    buckets: dict[str, tuple[Accuracy, ...]]
    runs_to_add: tuple[RunToAdd, ...]
    is_finished: bool


def diagnose(
    model: StepTimeModel,
    observed: Sequence[ObservedSteps],
    options: FitOptions,
    held_out: Evaluation | None = None,
    *,
    max_runs: int = 3,
) -> Diagnosis:
    """The health of ``model``, fitted to ``observed`` with ``options``; ``held_out`` judges it if known."""
    design = fitted_design(observed, options.structure, options.experts_read)
    rows = relative_rows(design.matrix, design.measured_us, [np.arange(design.num_steps)])
    columns, condition = diagnose_columns(design, rows), condition_number(rows)
    by_bucket = buckets(predict_runs(model, observed) if held_out is None else held_out.predictions)
    checks = (
        *_coefficient_checks(model, columns),
        *_bound_checks(model, design, options),
        *_error_checks(condition, held_out, by_bucket),
    )
    failed = tuple(check for fails, check in checks if fails)
    return Diagnosis(
        condition=condition,
        columns=columns,
        checks=failed,
        buckets=by_bucket,
        runs_to_add=suggest_runs(model, design, options, max_runs=max_runs),
        is_finished=not any(check.kind == "warning" for check in failed),
    )


_Checks: TypeAlias = Iterable[tuple[bool, HealthCheck]]
"""Checks, and for each whether it fails."""


def _coefficient_checks(model: StepTimeModel, columns: Sequence[ColumnDiagnosis]) -> _Checks:
    for index, (coefficient, column) in enumerate(zip(model.coefficients, columns, strict=True)):
        yield from _value_checks(coefficient, column)
        if coefficient.is_identified:
            yield from _spread_checks(coefficient, np.array([draw[index] for draw in model.draws]))


def _value_checks(coefficient: Coefficient, column: ColumnDiagnosis) -> _Checks:
    name, value = coefficient.name, coefficient.value
    why, remedy = (
        (
            "constant in these deployments, or a sum of other features",
            "predict only these models and tensor-parallel sizes, or add others",
        )
        if column.share_frac
        else ("no step has this feature", "predict only steps without it, or add a run that has it")
    )
    return (
        (
            value < 0,
            HealthCheck(
                "negative",
                name,
                f"{value:.3g}: a part of a step cannot take less than no time",
                "the feature is collinear with another, or the data are wrong: see its VIF",
            ),
        ),
        (
            not coefficient.unit and value > MAX_FACTOR,
            HealthCheck(
                "far-above-peak",
                name,
                f"{value:.3g} times the time at peak; above {MAX_FACTOR:g} it does not describe the work",
                "take another structure, or correct the peaks and the shape",
            ),
        ),
        (
            not coefficient.unit and name.endswith("weights") and 0 < value < 0.3,
            HealthCheck(
                "weights-hidden",
                name,
                f"{value:.3g}: the weights seem to be read while something else takes the time",
                "use the structure 'overlap', max(compute, kv + weights)",
            ),
        ),
        (
            "expert" in name and 0 < value < 0.5,
            HealthCheck(
                "experts-overcounted",
                name,
                f"{value:.3g}: fewer experts are read than the rule counts",
                "use --experts uniform, or a measured table; group-limited routing reads fewer still",
            ),
        ),
        (
            not coefficient.is_identified,
            HealthCheck(
                "not-identified",
                name,
                f"{value:.3g} is a typical value and not measured: {why}",
                remedy,
                "note",
            ),
        ),
    )


def _spread_checks(coefficient: Coefficient, draws: Floats) -> _Checks:
    """The width of the interval and, where that passes, the spread of the draws over the coefficient."""
    name, value = coefficient.name, coefficient.value
    low, high = (value if bound is None else bound for bound in (coefficient.low, coefficient.high))
    is_wide = high - low > MAX_RELATIVE_WIDTH * abs(value) > 0
    cv = float(np.std(draws, ddof=1)) / value if len(draws) > 1 and value > 0 else 0.0
    return (
        (
            is_wide,
            HealthCheck(
                "wide-interval",
                name,
                f"90 % interval {low:.3g} to {high:.3g} is wider than {MAX_RELATIVE_WIDTH:g} times its value",
                _WIDTH_REMEDIES.get(name, _ADD_LISTED),
            ),
        ),
        (
            cv > MAX_CV and not is_wide,
            HealthCheck(
                "unsteady",
                name,
                f"varies by {cv:.0%} between bootstrap draws; {MAX_CV:.0%} is too much, {ENOUGH_CV:.0%} enough",
                _ADD_LISTED,
            ),
        ),
    )


def _bound_checks(model: StepTimeModel, design: Design, options: FitOptions) -> _Checks:
    """Coefficients at 0 that would lie below it without the constraint."""
    if options.constraint == "none" or options.structure == "roofline":
        return ()
    free = fit_to(design, np.arange(design.num_steps), replace(options, constraint="none"))
    return (
        (
            coefficient.value == 0 and value < 0 and coefficient.is_identified,
            HealthCheck(
                "held-at-zero",
                coefficient.name,
                f"held at 0; without the bound it is {value:.3g}",
                "its part of the time is with a collinear feature: see the VIFs",
                "note",
            ),
        )
        for coefficient, value in zip(model.coefficients, free, strict=True)
    )


def _error_checks(
    condition: float, held_out: Evaluation | None, by_bucket: dict[str, tuple[Accuracy, ...]]
) -> _Checks:
    yield (
        MAX_CONDITION < condition < np.inf,
        HealthCheck(
            "ill-conditioned", "design", f"condition number {condition:.3g}, above {MAX_CONDITION:g}", _ADD_LISTED
        ),
    )
    if held_out is not None:
        yield (
            held_out.whole.mape_frac > MAX_MAPE,
            HealthCheck(
                "inaccurate",
                f"unseen {held_out.by}",
                f"mean error {held_out.whole.mape_frac:.1%}, above {MAX_MAPE:.0%}",
                "add runs like those that will be predicted",
            ),
        )
    for kind, accuracies in by_bucket.items():
        for accuracy in accuracies:
            yield (
                accuracy.mape_frac > MAX_BUCKET_MAPE and accuracy.num_steps >= 5,
                HealthCheck(
                    "bad-bucket",
                    f"{kind} {accuracy.label}",
                    f"mean error {accuracy.mape_frac:.1%} over {accuracy.num_steps} steps, above "
                    f"{MAX_BUCKET_MAPE:.0%}",
                    "add steps like these, or look at them: their times may not be their own",
                ),
            )


def suggest_runs(
    model: StepTimeModel, design: Design, options: FitOptions, *, max_runs: int = 3
) -> tuple[RunToAdd, ...]:
    """The runs to add next, the most useful first, each with the coefficients that it determines; at most
    ``max_runs``, and none once no run would help.
    """
    if options.structure == "roofline":
        return ()
    spreads = np.array([anchor_of(name, options.structure).spread for name in design.names])
    information = _information(design.matrix / design.measured_us[:, None], spreads) + np.eye(len(spreads))
    candidates = list(_candidates(model, design, spreads))
    chosen: list[RunToAdd] = []
    while len(chosen) < max_runs and candidates:
        before = np.linalg.inv(information)
        after = [np.linalg.inv(information + added) for _, added, _ in candidates]
        gains = 1.0 - np.array([np.trace(variance) for variance in after]) / np.trace(before)
        # Fall of the summed variances below which a run is not worth its time
        if gains.max() < 0.02:
            break
        # Time of a run beside its steps, so that the shortest ones are not endlessly good
        best = int(np.argmax(gains / (1.0 + np.array([duration_s for _, _, duration_s in candidates]))))
        # The coefficients whose variance the run at least halves, or the one that it helps most.
        falls = 1.0 - np.diag(after[best]) / np.diag(before)
        order = np.argsort(-falls)
        helped = tuple(design.names[i] for i in order if falls[i] >= 0.5) or (design.names[order[0]],)
        run, added, _ = candidates.pop(best)
        chosen.append(
            replace(
                run,
                reason=f"variance of {', '.join(helped)} falls by up to {falls[order[0]]:.0%}",
                coefficients=helped,
            )
        )
        information = information + added
    return tuple(chosen)


def _information(relative_rows: Floats, spreads: Floats) -> Floats:
    """A'A over the noise, in units of the spreads: 1 on the diagonal is as much as the anchor itself says.

    Steps of a run are not independent: every tenth counts.
    """
    scaled = relative_rows * spreads
    return np.asarray(scaled.T @ scaled / (10 * _NOISE_FRAC**2), dtype=np.float64)


def _candidates(model: StepTimeModel, design: Design, spreads: Floats) -> Iterator[tuple[RunToAdd, Floats, float]]:
    """Every run of the grid that fits into the memory of each deployment that was fitted.

    With it the sum of outer products of scaled rows over its steps, and its predicted duration in seconds.
    """
    deployments = {
        (run.deployment.shape.name, run.deployment.tensor_parallel): run.deployment for run in design.runs
    }
    values = np.array([model.values[name] for name in design.names])
    for deployment, prompt, output, concurrency in product(deployments.values(), PROMPTS, OUTPUTS, CONCURRENCY):
        if deployment.hardware.memory_bytes is not None and concurrency * (prompt + output) > kv_capacity_tokens(
            deployment
        ):
            continue
        columns = model.columns(_steps_of(prompt, output, concurrency), deployment)
        matrix = stacked([columns.get(name, 0.0) for name in design.names])
        predicted_us = matrix @ values
        # The outputs of its requests, as often as its batch is renewed.
        num_steps = num_requests(concurrency) / concurrency * output
        rows = matrix / np.maximum(predicted_us, 1.0)[:, None]
        yield (
            RunToAdd(
                prompt_tokens=prompt,
                output_tokens=output,
                concurrency=concurrency,
                reason="",
                model=deployment.shape.name,
                tensor_parallel=deployment.tensor_parallel,
            ),
            _information(rows, spreads) * (num_steps / _STEPS_OF_RUN),
            num_steps * float(np.mean(predicted_us)) / US_PER_S,
        )


def _steps_of(prompt: int, output: int, concurrency: int) -> StepWork:
    """Steps of a closed loop of such requests: a prompt joins as often as a request ends, else all rows decode.

    The outputs of a batch are on average half done; a single row shows every length.
    """
    index = np.arange(_STEPS_OF_RUN, dtype=np.float64)
    is_prefill = index % max(1, round(output / concurrency)) == 0
    num_prefills = np.where(is_prefill, max(1.0, concurrency / output), 0.0)
    num_decodes = np.maximum(concurrency - num_prefills, 0.0) * (output > 1)
    generated = index * output / _STEPS_OF_RUN if concurrency == 1 else np.full(_STEPS_OF_RUN, output / 2)
    context = num_decodes * (prompt + generated)
    return StepWork(
        num_prefills=num_prefills,
        prefill_tokens=num_prefills * prompt,
        prefill_positions=num_prefills * prompt * prompt / 2,
        num_decodes=num_decodes,
        decode_tokens=num_decodes,
        decode_context=context,
        decode_positions=context + num_decodes / 2,
        num_sampled=num_decodes + num_prefills,
    )
