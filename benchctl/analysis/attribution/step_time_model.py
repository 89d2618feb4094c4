"""A change of step time divided by a step-time model: batch, context, prompts, candidates, and what is left.

The model predicts the mean step of each run from its own steps. The difference of two predictions is divided among
the factors in which the mean steps of the runs differ (``mean_work.py``) by Shapley's rule: a factor gets the mean,
over all orders in which factors change from A to B, of what its change adds (L. S. Shapley, *A value for n-person
games*, 1953). Parts add up exactly, the order plays no role, and B against A is the negative of A against B. A
model that is not linear also sees how steps scatter about their mean: that is a part of its own. The rest is the
difference that the model does not predict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import factorial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.analysis.attribution.estimate import (
    MIN_DIFFERENCE,
    Contribution,
    PairDesign,
    estimate_contributions,
)
from benchctl.analysis.attribution.mean_work import FACTORS, MeanWork, works_between
from benchctl.costs.hardware import Hardware
from benchctl.steptime.work import Deployment, Quantity, StepWork
from benchctl.units import US_PER_S

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
class ModelSource:
    """Origin of a step-time model, and its error on steps that its fit did not see; None where that is unknown."""

    name: str
    mape_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedModel:
    """A step-time model and its origin; ``hardware`` is the device whose peaks its features are computed with."""

    predict_us: PredictUs
    source: ModelSource
    hardware: Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """Mean time of a step: ``factors`` and ``rest`` add up to ``whole``, ``factors`` alone to ``predicted``.

    ``whole``, ``predicted`` and ``rest`` have the means of both sides.
    """

    source: ModelSource
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
        source=model.source,
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
