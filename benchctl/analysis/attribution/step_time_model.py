"""A change of step time divided by a step-time model: batch, context, prompts, candidates, and what is left.

The work of a run is that of two mean steps, one that only decodes and one that carries prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import factorial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.analysis.attribution.estimate import MIN_DIFFERENCE, Contribution, PairDesign, estimate_contributions
from benchctl.costs.hardware import Hardware
from benchctl.steptime.work import Deployment, Quantity, StepWork
from benchctl.units import US_PER_S

Flags: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]


MeanStep: TypeAlias = Mapping[str, float]
"""Counts of ``FACTORS`` in a mean step; all but ``rows`` and ``prompts`` are means over these, NaN without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanWork:
    """The mean steps of a run, None for a kind that it has not; ``prompt_frac`` of its steps carry prompts."""

    prompt_frac: float
    decoding: MeanStep | None
    prompting: MeanStep | None


FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch": ("rows",),
    "context": ("row_context", "prompt_context"),
    "prompts": ("prompts", "prompt_tokens", "prompt_ends", "value_prefill_tokens"),
    "candidates": ("guided", "candidates", "value_extend_tokens"),
    "drafts": ("row_tokens",),
}
"""What two runs may differ in, and the fields of a mean step that say so. ``prompts`` has the share of the steps
that carry them as well."""
_PROMPTS: Final = list(FACTORS).index("prompts")
_FACTOR_OF: Final = {field: index for index, names in enumerate(FACTORS.values()) for field in names}


def mean_work(work: StepWork, num_steps: int) -> MeanWork:
    """The mean steps of a run's ``work``. Raises ValueError without steps."""
    if num_steps < 1:
        raise ValueError("a run without steps has no mean step")
    columns = {field.name: np.broadcast_to(getattr(work, field.name), num_steps) for field in fields(work)}
    prompting = columns["num_prefills"] > 0
    return MeanWork(
        prompt_frac=float(prompting.mean()),
        decoding=_mean_step(columns, ~prompting),
        prompting=_mean_step(columns, prompting),
    )


def _mean_step(columns: Mapping[str, Floats], where: Flags) -> MeanStep | None:
    if not where.any():
        return None
    mean = {name: float(column[where].mean()) for name, column in columns.items()}
    rows, prompts = mean["num_decodes"], mean["num_prefills"]
    of_rows = {
        "row_context": mean["decode_context"],
        "row_tokens": mean["decode_tokens"],
        "guided": mean["guided_rows"],
        "candidates": mean["candidates"],
        "value_extend_tokens": mean["value_extend_tokens"],
    }
    of_prompts = {
        "prompt_context": mean["prefill_context"],
        "prompt_tokens": mean["prefill_tokens"],
        "prompt_ends": mean["num_sampled"] - rows,
        "value_prefill_tokens": mean["value_prefill_tokens"],
    }
    return {
        "rows": rows,
        "prompts": prompts,
        **{name: value / rows if rows else np.nan for name, value in of_rows.items()},
        **{name: value / prompts if prompts else np.nan for name, value in of_prompts.items()},
    }


def works_between(a: MeanWork, b: MeanWork, takes_b: Flags) -> Sequence[tuple[Floats, StepWork]]:
    """Mean steps with some factors of ``b`` and the others of ``a``, each kind with its share of all steps.

    ``takes_b`` has a row for each combination and a column for each of ``FACTORS``; shares and works have a value
    for each combination. A kind of step that only one run has is taken from that run.
    """
    prompt_frac = np.where(takes_b[:, _PROMPTS], b.prompt_frac, a.prompt_frac)
    kinds = [(1 - prompt_frac, a.decoding, b.decoding), (prompt_frac, a.prompting, b.prompting)]
    works = []
    for share, step_a, step_b in kinds:
        first, second = step_a or step_b, step_b or step_a
        if first is not None and second is not None:
            works.append((share, _work_between(first, second, takes_b)))
    return works


def _work_between(a: MeanStep, b: MeanStep, takes_b: Flags) -> StepWork:
    def mixed(name: str) -> Quantity:
        of_a, of_b = a[name], b[name]
        of_a, of_b = (other if np.isnan(own) else own for own, other in ((of_a, of_b), (of_b, of_a)))
        return np.where(takes_b[:, _FACTOR_OF[name]], float(np.nan_to_num(of_b)), float(np.nan_to_num(of_a)))

    rows, prompts = mixed("rows"), mixed("prompts")
    row_tokens, row_context = mixed("row_tokens"), mixed("row_context")
    prompt_tokens, prompt_context = mixed("prompt_tokens"), mixed("prompt_context")
    return StepWork(
        num_prefills=prompts,
        prefill_tokens=prompts * prompt_tokens,
        prefill_context=prompts * prompt_context,
        prefill_positions=prompts * prompt_tokens * (prompt_context + prompt_tokens / 2),
        num_decodes=rows,
        decode_tokens=rows * row_tokens,
        decode_context=rows * row_context,
        decode_positions=rows * row_tokens * (row_context + row_tokens / 2),
        num_sampled=rows + prompts * mixed("prompt_ends"),
        guided_rows=rows * mixed("guided"),
        candidates=rows * mixed("candidates"),
        value_prefill_tokens=prompts * mixed("value_prefill_tokens"),
        value_extend_tokens=rows * mixed("value_extend_tokens"),
    )


PredictUs: TypeAlias = Callable[[StepWork, Deployment], Quantity]
"""Duration of steps in microseconds."""

MODEL: Final = "model and devices"
SCATTER: Final = "scatter of the steps"
REST: Final = "not explained by the work"
_NAMES: Final = (*FACTORS, MODEL)
_ORDERS: Final = np.array(list(product([False, True], repeat=len(_NAMES))))
"""Every set of factors that are those of B, a row each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledRun:
    """Mean step of a run as measured and as predicted from its steps, and what it worked on."""

    step_s: float
    predicted_s: float
    work: MeanWork
    deployment: Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedModel:
    """A step-time model, its origin, and its error on steps left out of its fit; None where that is unknown."""

    name: str
    predict_us: PredictUs
    hardware: Hardware
    """The device whose peaks its features are computed with."""
    mape_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """Mean time of a step: ``factors`` and ``rest`` add up to ``whole``, ``factors`` alone to ``predicted``.

    ``whole``, ``predicted`` and ``rest`` have the means of both sides.
    """

    source: SourcedModel
    whole: Contribution
    predicted: Contribution
    factors: tuple[Contribution, ...]
    rest: Contribution

    @property
    def shown_factors(self) -> tuple[Contribution, ...]:
        """The factors in which any two runs of both sides differ."""
        return tuple(part for part in self.factors if max(map(abs, part.numbers)) > MIN_DIFFERENCE)

    @property
    def parts(self) -> tuple[Contribution, ...]:
        return *self.factors, self.rest

    @property
    def explained_frac(self) -> float | None:
        """Share of the difference that the model predicts; None without a difference."""
        return self.predicted.share_of(self.whole)


def split_by_model(
    model: SourcedModel, a: Sequence[ModelledRun], b: Sequence[ModelledRun], design: PairDesign
) -> ModelSplit:
    """The difference of mean step times, by what the model says about the work of both sides."""

    def split(x: ModelledRun, y: ModelledRun) -> tuple[float, ...]:
        predicted_s = y.predicted_s - x.predicted_s
        factors_s = shapley_s(model.predict_us, x, y)
        scatter_s = predicted_s - sum(factors_s)
        return y.step_s - x.step_s, predicted_s, *factors_s, scatter_s, (y.step_s - x.step_s) - predicted_s

    names = ("step", "predicted", *_NAMES, SCATTER, REST)
    whole, predicted, *factors, rest = estimate_contributions(names, a, b, split, design)
    return ModelSplit(
        source=model,
        whole=_with_levels(whole, [run.step_s for run in a]),
        predicted=_with_levels(predicted, [run.predicted_s for run in a]),
        factors=tuple(factors),
        rest=_with_levels(rest, [run.step_s - run.predicted_s for run in a]),
    )


def shapley_s(predict_us: PredictUs, a: ModelledRun, b: ModelledRun) -> tuple[float, ...]:
    """Seconds that each factor adds to the predicted mean step: those of ``FACTORS``, then the model itself."""
    values = _mean_steps_us(predict_us, a, b) / US_PER_S
    num_set = _ORDERS.sum(axis=1)
    n = len(_NAMES)
    parts = []
    for factor in range(n):
        without = ~_ORDERS[:, factor]
        weights = np.array([factorial(size) * factorial(n - size - 1) / factorial(n) for size in range(n)])
        with_factor = np.flatnonzero(without) + 2 ** (n - 1 - factor)
        parts.append(float((weights[num_set[without]] * (values[with_factor] - values[without])).sum()))
    return tuple(parts)


def _mean_steps_us(predict_us: PredictUs, a: ModelledRun, b: ModelledRun) -> npt.NDArray[np.float64]:
    """The predicted mean step of every row of ``_ORDERS``."""
    is_b, total_us = _ORDERS[:, -1], np.zeros(len(_ORDERS))
    deployed_a, deployed_b = _deployments(a, b)
    for share, work in works_between(a.work, b.work, _ORDERS[:, :-1]):
        of_a = predict_us(work, deployed_a)
        of_b = of_a if deployed_a == deployed_b else predict_us(work, deployed_b)
        total_us += np.where(share > 0, share * np.where(is_b, of_b, of_a), 0.0)
    return total_us


def _deployments(a: ModelledRun, b: ModelledRun) -> tuple[Deployment, Deployment]:
    """Both deployments; a value model that only one side has counts by its candidates, not as another model."""
    value_a, value_b = a.deployment.value_shape, b.deployment.value_shape
    return (
        replace(a.deployment, value_shape=value_a or value_b),
        replace(b.deployment, value_shape=value_b or value_a),
    )


def _with_levels(part: Contribution, values_a: Sequence[float]) -> Contribution:
    a_s = float(np.mean(values_a))
    return replace(part, a_s=a_s, b_s=a_s + part.added_s)
