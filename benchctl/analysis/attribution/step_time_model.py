"""A change of step time divided by a step-time model: batch, context, prompts, candidates, and what is left.

The work of a run is that of two mean steps, one that only decodes and one that carries prompts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import comb
from typing import Final, TypeAlias

import numpy as np

from benchctl.analysis.attribution.estimate import (
    MIN_DIFFERENCE,
    Contribution,
    PairDesign,
    Split,
    contribution_of,
    estimate_levels,
    estimate_terms,
)
from benchctl.costs.hardware import Hardware
from benchctl.records.columns import Flags, Floats
from benchctl.steptime.work import Deployment, Quantity, StepWork
from benchctl.units import US_PER_S

FACTORS: Final = ("batch", "context", "prompts", "candidates", "drafts")
"""What two runs may differ in; ``prompts`` has the share of the steps that carry them as well."""
_OF_ROWS: Final = {
    "decode_tokens": "drafts",
    "decode_context": "context",
    "guided_rows": "candidates",
    "candidates": "candidates",
    "value_extend_tokens": "candidates",
}
_OF_PROMPTS: Final = {
    "prefill_tokens": "prompts",
    "prefill_context": "context",
    "num_sampled": "prompts",
    "value_prefill_tokens": "prompts",
}
_FACTOR_OF: Final = {"num_decodes": "batch", "num_prefills": "prompts", **_OF_ROWS, **_OF_PROMPTS}
"""The counts of a mean step by their names in ``StepWork``, and the factor that each belongs to."""

MeanStep: TypeAlias = Mapping[str, float]
"""Those counts; of ``_OF_ROWS`` and ``_OF_PROMPTS`` the means over rows or prompts, NaN without any."""
MeanWork: TypeAlias = Sequence[tuple[float, MeanStep | None]]
"""Share and mean step of the steps that only decode, then of those that carry prompts; None without any."""
PredictUs: TypeAlias = Callable[[StepWork, Deployment], Quantity]
"""Duration of steps in microseconds."""


def mean_work(work: StepWork, num_steps: int) -> MeanWork:
    """The mean steps of a run's ``work``, of at least one step."""
    columns = {field.name: np.broadcast_to(getattr(work, field.name), num_steps) for field in fields(work)}
    prompting = columns["num_prefills"] > 0
    prompt_frac = float(prompting.mean())
    kinds = []
    for share, where in ((1 - prompt_frac, ~prompting), (prompt_frac, prompting)):
        mean = {name: float(columns[name][where].mean()) for name in _FACTOR_OF} if share else None
        if mean is not None:
            mean["num_sampled"] -= mean["num_decodes"]  # what prompts that end have sampled
            for count, names in (("num_decodes", _OF_ROWS), ("num_prefills", _OF_PROMPTS)):
                mean |= {name: mean[name] / mean[count] if mean[count] else np.nan for name in names}
        kinds.append((share, mean))
    return kinds


def _works_between(a: MeanWork, b: MeanWork, takes_b: Mapping[str, Flags]) -> Iterator[tuple[Floats, StepWork]]:
    """Mean steps with some factors of ``b`` and the others of ``a``, each kind with its share of all steps.

    ``takes_b`` has each factor's flag for every combination; shares and works have a value for each combination. A
    kind of step that only one run has is taken from that run.
    """
    for (share_a, step_a), (share_b, step_b) in zip(a, b, strict=True):
        first, second = step_a or step_b, step_b or step_a
        if first is None or second is None:
            continue
        mixed: dict[str, Floats] = {}
        for name, factor in _FACTOR_OF.items():
            of_a, of_b = first[name], second[name]
            of_a, of_b = (other if np.isnan(own) else own for own, other in ((of_a, of_b), (of_b, of_a)))
            mixed[name] = np.nan_to_num(np.where(takes_b[factor], of_b, of_a))
        rows, prompts = mixed["num_decodes"], mixed["num_prefills"]
        counts = {name: rows * mixed[name] for name in _OF_ROWS}
        counts |= {name: prompts * mixed[name] for name in _OF_PROMPTS}
        counts["num_sampled"] += rows
        yield (
            np.where(takes_b["prompts"], share_b, share_a),
            StepWork(
                num_prefills=prompts,
                prefill_positions=counts["prefill_tokens"]
                * (mixed["prefill_context"] + mixed["prefill_tokens"] / 2),
                num_decodes=rows,
                decode_positions=counts["decode_tokens"] * (mixed["decode_context"] + mixed["decode_tokens"] / 2),
                **counts,
            ),
        )


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
class ModelSplit(Split):
    """The mean step by its work, and the rest. The parts before the rest add up to ``predicted``.

    ``whole``, ``predicted`` and ``rest`` have the means of both sides.
    """

    source: SourcedModel
    predicted: Contribution

    @property
    def shown_parts(self) -> tuple[Contribution, ...]:
        """The factors in which any two runs of both sides differ, and the rest."""
        differing = (part for part in self.parts[:-1] if max(map(abs, part.numbers)) > MIN_DIFFERENCE)
        return *differing, self.rest

    @property
    def explained_frac(self) -> float | None:
        """Share of the difference that the model predicts; None without a difference."""
        return self.predicted.share_of(self.whole)


def split_by_model(
    model: SourcedModel, a: Sequence[ModelledRun], b: Sequence[ModelledRun], design: PairDesign
) -> ModelSplit:
    """The difference of mean step times, by what the model says about the work of both sides."""

    def factors_s(x: ModelledRun, y: ModelledRun) -> tuple[float, ...]:
        parts = shapley_s(model.predict_us, x, y)
        return *parts, y.predicted_s - x.predicted_s - sum(parts)

    rows_a, rows_b = (
        [{"step": x.step_s, "predicted": x.predicted_s, REST: x.step_s - x.predicted_s} for x in side]
        for side in (a, b)
    )
    whole, predicted, rest = estimate_levels(rows_a, rows_b, design)
    factors = map(contribution_of, (*_NAMES, SCATTER), estimate_terms(a, b, factors_s, design))
    return ModelSplit(source=model, origin=model.name, whole=whole, predicted=predicted, parts=(*factors, rest))


def shapley_s(predict_us: PredictUs, a: ModelledRun, b: ModelledRun) -> tuple[float, ...]:
    """Seconds that each factor adds to the predicted mean step: those of ``FACTORS``, then the model itself."""
    values = _mean_steps_us(predict_us, a, b) / US_PER_S
    num_set, n = _ORDERS.sum(axis=1), len(_NAMES)
    weights = np.array([1 / (n * comb(n - 1, size)) for size in range(n)])
    parts = []
    for factor in range(n):
        without = np.flatnonzero(~_ORDERS[:, factor])
        added = values[without + 2 ** (n - 1 - factor)] - values[without]
        parts.append(float((weights[num_set[without]] * added).sum()))
    return tuple(parts)


def _mean_steps_us(predict_us: PredictUs, a: ModelledRun, b: ModelledRun) -> Floats:
    """The predicted mean step of every row of ``_ORDERS``.

    A value model that only one side has counts by its candidates, not as another model.
    """
    takes_b, total_us = dict(zip(_NAMES, _ORDERS.T, strict=True)), np.zeros(len(_ORDERS))
    value_a, value_b = a.deployment.value_shape, b.deployment.value_shape
    deployed_a = replace(a.deployment, value_shape=value_a or value_b)
    deployed_b = replace(b.deployment, value_shape=value_b or value_a)
    for share, work in _works_between(a.work, b.work, takes_b):
        of_a = predict_us(work, deployed_a)
        of_b = of_a if deployed_a == deployed_b else predict_us(work, deployed_b)
        total_us += np.where(share > 0, share * np.where(takes_b[MODEL], of_b, of_a), 0.0)
    return total_us
