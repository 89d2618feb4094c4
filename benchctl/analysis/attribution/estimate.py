"""Parts of a difference between two sides, each with its interval, that add up exactly.

Also the parts by a step-time model: batch, context, prompts, candidates, and what is left. The work of a run is
then that of two mean steps, one that only decodes and one that carries prompts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Final, TypeAlias, TypeVar

import numpy as np

from benchctl.analysis.statistics.estimate import PooledSlope, RatioEstimate, SideRatio, estimate_paired
from benchctl.analysis.statistics.intervals import StudentT
from benchctl.costs.hardware import Hardware
from benchctl.records.columns import Flags, Floats
from benchctl.steptime.work import Deployment, Quantity, StepWork
from benchctl.units import US_PER_S

Run = TypeVar("Run")
Row: TypeAlias = Mapping[str, float]
"""Values of a run by name."""
_ROUNDING: Final = 1e-12
MIN_DIFFERENCE: Final = 1e-9
"""A smaller difference is rounding, whatever its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDesign:
    """Pairing of the runs of two sides.

    ``positions`` are those of B less those of A where the effect of the position is removed: by the runs, and then
    with ``slope``, or where that is None by the estimate itself.
    """

    is_paired: bool
    confidence: float = 0.95
    positions: tuple[int, ...] | None = None
    slope: PooledSlope | None = None
    """Of values that are adjusted already: an effect of 0, with the information on the one that was removed."""
    evidence: tuple[float, ...] | None = None
    """Log-ratios of the blocks, from which the robust estimator takes their weights; None: equal weights."""

    @classmethod
    def of(cls, ratio: SideRatio) -> "PairDesign":
        """The design of the factors of a ratio: its blocks, with the same positions and weights."""
        return cls(
            is_paired=ratio.estimate.is_paired,
            confidence=ratio.estimate.confidence,
            positions=ratio.design.positions,
            slope=None if ratio.design.slope is None else PooledSlope(0.0, ratio.design.slope.information),
            evidence=ratio.evidence,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a difference of two times, in seconds; the parts of one difference add up to it.

    ``a_s`` and ``b_s`` are the times of both sides if the part has one on each; b_s - a_s is added_s.
    """

    name: str
    added_s: float
    ci_low_s: float | None = None
    ci_high_s: float | None = None
    a_s: float | None = None
    b_s: float | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """All of its numbers that are known."""
        numbers = (self.added_s, self.a_s, self.b_s, self.ci_low_s, self.ci_high_s)
        return tuple(number for number in numbers if number is not None)

    @property
    def ratio(self) -> float | None:
        """B over A; None where A has no time."""
        return self.b_s / self.a_s if self.a_s and self.b_s is not None else None

    @property
    def is_significant(self) -> bool:
        """Its interval excludes 0."""
        return excludes_zero((self.ci_low_s, self.ci_high_s), self.added_s)

    def share_of(self, whole: "Part") -> float | None:
        """Its share of the whole difference; None if that is not significantly different from 0."""
        return self.added_s / whole.added_s if whole.is_significant else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor(Part):
    """The part that a factor of the ratio has in the difference of the wall times, in whatever order:
    (b - a) ln f / ln(b / a), with its interval for a known b - a.
    """

    estimate: RatioEstimate
    """The factor, B over A."""

    @property
    def is_significant(self) -> bool:
        """It differs significantly from 1."""
        return excludes_zero(self.estimate.log_interval, self.estimate.log_ratio)


def excludes_zero(interval: tuple[float | None, float | None] | None, value: float) -> bool:
    """True if the whole interval of ``value`` is known and on one side of 0; rounding does not count."""
    low, high = interval or (None, None)
    return low is not None and high is not None and (low > 0 or high < 0) and abs(value) > MIN_DIFFERENCE


def estimate_terms(
    a: Sequence[Run], b: Sequence[Run], split: Callable[[Run, Run], Sequence[float]], design: PairDesign
) -> list[RatioEstimate]:
    """An estimate of each number that ``split`` returns, in ``log_ratio`` whatever its unit.

    Both sides have at least one run.
    """
    if not design.is_paired:
        pairs = np.array([[split(x, y) for y in b] for x in a], dtype=float)
        return [_of_all_pairs(pairs[:, :, term], design.confidence) for term in range(pairs.shape[2])]
    by_block = [split(x, y) for x, y in zip(a, b, strict=True)]
    return [
        estimate_paired(
            values,
            design.confidence,
            design.positions,
            slope=design.slope,
            estimator="mean" if design.evidence is None else "robust",
            evidence=design.evidence,
        )
        for values in zip(*by_block, strict=True)
    ]


def _of_all_pairs(pairs: Floats, confidence: float) -> RatioEstimate:
    """Mean over all pairs; variance = var(means of rows) / n_a + var(means of columns) / n_b."""
    sizes, centre, uncertainty = pairs.shape, float(pairs.mean()), None
    if min(sizes) > 1:
        parts = [float(pairs.mean(axis=1 - side).var(ddof=1)) / size for side, size in enumerate(sizes)]
        squared, spread = sum(parts), sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
        df = squared**2 / spread if spread > 0 else float(sum(sizes) - 2)
        uncertainty = StudentT(centre, float(np.sqrt(squared)), df)
    return RatioEstimate(
        num_blocks=min(sizes), is_paired=False, confidence=confidence, log_ratio=centre, uncertainty=uncertainty
    )


def part_of(name: str, estimate: RatioEstimate, a_s: float | None = None) -> Part:
    """The part that ``estimate`` is a difference of, in seconds; ``a_s`` is the mean of side A, if it has one."""
    added_s = estimate.log_ratio
    low, high = estimate.log_interval or (None, None)
    if a_s is None:
        return Part(name=name, added_s=added_s, ci_low_s=low, ci_high_s=high)
    b_s = 0.0 if abs(a_s + added_s) < _ROUNDING * abs(a_s) else a_s + added_s
    return Part(name=name, added_s=added_s, ci_low_s=low, ci_high_s=high, a_s=a_s, b_s=b_s)


def estimate_differences(a: Sequence[Row], b: Sequence[Row], design: PairDesign) -> dict[str, RatioEstimate]:
    """The difference of each value of the runs; those that a run does not have are 0."""
    names = list(dict.fromkeys(name for row in sorted((*a, *b), key=len, reverse=True) for name in row))

    def split(x: Row, y: Row) -> list[float]:
        return [y.get(name, 0.0) - x.get(name, 0.0) for name in names]

    return dict(zip(names, estimate_terms(a, b, split, design), strict=True))


def estimate_levels(a: Sequence[Row], b: Sequence[Row], design: PairDesign) -> list[Part]:
    """The differences of the runs' times, in seconds, with the means of both sides."""
    estimates = estimate_differences(a, b, design)
    means_a = np.mean([[row.get(name, 0.0) for name in estimates] for row in a], axis=0).tolist()
    return list(map(part_of, estimates, estimates.values(), means_a))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Invariant: ``parts`` add up to ``whole``, a time or its difference."""

    whole: Part
    parts: tuple[Part, ...]
    origin: str = ""
    """The clock of measured times, the device whose peaks a model has, or the model."""
    unplaced: tuple[str, ...] = ()
    """Sections outside the tree, because their parents are unknown."""
    predicted: Part | None = None
    """Of a model: its prediction, to which all parts but the last add up."""
    mape_frac: float | None = None
    """Of a model: its error on steps left out of its fit; None where that is unknown."""

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: abs(part.added_s))

    @property
    def rest(self) -> Part:
        """Of a model: what it does not explain."""
        return self.parts[-1]

    @property
    def shown_parts(self) -> tuple[Part, ...]:
        """Of a model: the parts in which any two runs of both sides differ, and the rest."""
        differing = (part for part in self.parts[:-1] if max(map(abs, part.numbers)) > MIN_DIFFERENCE)
        return *differing, self.rest

    @property
    def explained_frac(self) -> float | None:
        """Of a model: the share of the difference that it predicts; None without a difference."""
        return None if self.predicted is None else self.predicted.share_of(self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class WallSplit(Split):
    """Invariant: the factors multiply to the ratio of the whole, too, which is b_s / a_s.

    The times of both sides are centres over the blocks, at equal positions if adjusted for the order.
    """

    whole: Factor
    parts: tuple[Factor, ...]


def logarithmic_mean(a: float, b: float) -> float:
    """(b - a) / ln(b / a); a if both are equal."""
    log = math.log(b) - math.log(a)
    return a * (math.expm1(log) / log) if log else a


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


def split_by_model(
    model: SourcedModel, a: Sequence[ModelledRun], b: Sequence[ModelledRun], design: PairDesign
) -> Split:
    """The difference of mean step times, by what the model says about the work of both sides."""

    def factors_s(x: ModelledRun, y: ModelledRun) -> tuple[float, ...]:
        parts = shapley_s(model.predict_us, x, y)
        return *parts, y.predicted_s - x.predicted_s - sum(parts)

    rows_a, rows_b = (
        [{"step": x.step_s, "predicted": x.predicted_s, REST: x.step_s - x.predicted_s} for x in side]
        for side in (a, b)
    )
    whole, predicted, rest = estimate_levels(rows_a, rows_b, design)
    factors = map(part_of, (*_NAMES, SCATTER), estimate_terms(a, b, factors_s, design))
    return Split(
        whole=whole, parts=(*factors, rest), origin=model.name, predicted=predicted, mape_frac=model.mape_frac
    )


def shapley_s(predict_us: PredictUs, a: ModelledRun, b: ModelledRun) -> tuple[float, ...]:
    """Seconds that each factor adds to the predicted mean step: those of ``FACTORS``, then the model itself."""
    values = _mean_steps_us(predict_us, a, b) / US_PER_S
    num_set, n = _ORDERS.sum(axis=1), len(_NAMES)
    weights = np.array([1 / (n * math.comb(n - 1, size)) for size in range(n)])
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
