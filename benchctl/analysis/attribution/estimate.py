"""Parts of a difference between two sides, each with its interval, that add up exactly."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.statistics.estimate import PooledSlope, RatioEstimate, estimate_paired
from benchctl.analysis.statistics.intervals import StudentT

Run = TypeVar("Run")
Row: TypeAlias = Mapping[str, float]
"""Values of a run by name."""
_ROUNDING: Final = 1e-12
MIN_DIFFERENCE: Final = 1e-9
"""A smaller difference is rounding, whatever its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDesign:
    """Pairing of the runs of two sides.

    ``positions`` are those of B less those of A where the effect of the position is removed: by the runs, with
    ``position_information`` about it (``PooledSlope``), or where that is None by the estimate itself.
    """

    is_paired: bool
    confidence: float = 0.95
    positions: tuple[int, ...] | None = None
    position_information: float | None = None
    evidence: tuple[float, ...] | None = None
    """Log-ratios of the blocks, from which the robust estimator takes their weights; None: equal weights."""

    @property
    def slope(self) -> PooledSlope | None:
        """The slope of adjusted values."""
        return None if self.position_information is None else PooledSlope(0.0, self.position_information)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A part of a difference of means over blocks, in seconds; the parts of one difference add up to it.

    ``a_s`` and ``b_s`` are the means of both sides if the part has a value on each; b_s - a_s is added_s.
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
    def is_significant(self) -> bool:
        """Its interval excludes 0."""
        return excludes_zero((self.ci_low_s, self.ci_high_s), self.added_s)

    def share_of(self, whole: "Contribution") -> float | None:
        """Its share of the whole difference; None if that is not significantly different from 0."""
        return self.added_s / whole.added_s if whole.is_significant else None


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


def _of_all_pairs(pairs: NDArray[np.float64], confidence: float) -> RatioEstimate:
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


def contribution_of(name: str, estimate: RatioEstimate, a_s: float | None = None) -> Contribution:
    """The part that ``estimate`` is a difference of, in seconds; ``a_s`` is the mean of side A, if it has one."""
    added_s = estimate.log_ratio
    low, high = estimate.log_interval or (None, None)
    if a_s is None:
        return Contribution(name=name, added_s=added_s, ci_low_s=low, ci_high_s=high)
    b_s = 0.0 if abs(a_s + added_s) < _ROUNDING * abs(a_s) else a_s + added_s
    return Contribution(name=name, added_s=added_s, ci_low_s=low, ci_high_s=high, a_s=a_s, b_s=b_s)


def estimate_differences(a: Sequence[Row], b: Sequence[Row], design: PairDesign) -> dict[str, RatioEstimate]:
    """The difference of each value of the runs; those that a run does not have are 0."""
    names = list(dict.fromkeys(name for row in sorted((*a, *b), key=len, reverse=True) for name in row))

    def split(x: Row, y: Row) -> list[float]:
        return [y.get(name, 0.0) - x.get(name, 0.0) for name in names]

    return dict(zip(names, estimate_terms(a, b, split, design), strict=True))


def estimate_levels(a: Sequence[Row], b: Sequence[Row], design: PairDesign) -> list[Contribution]:
    """The differences of the runs' times, in seconds, with the means of both sides."""
    estimates = estimate_differences(a, b, design)
    means_a = np.mean([[row.get(name, 0.0) for name in estimates] for row in a], axis=0).tolist()
    return list(map(contribution_of, estimates, estimates.values(), means_a))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Invariant: ``parts`` add up to ``whole``, the mean step or its difference."""

    whole: Contribution
    parts: tuple[Contribution, ...]
    origin: str
    """The clock of measured times, or the device whose peaks a model has."""
    unplaced: tuple[str, ...] = ()
    """Sections outside the tree, because their parents are unknown."""

    @property
    def largest(self) -> Contribution:
        return max(self.parts, key=lambda part: abs(part.added_s))

    @property
    def rest(self) -> Contribution:
        """Of a model: what it does not explain."""
        return self.parts[-1]


def logarithmic_mean(a: float, b: float) -> float:
    """(b - a) / ln(b / a); a if both are equal."""
    log = math.log(b) - math.log(a)
    return a * (math.expm1(log) / log) if log else a


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Ratio of the mean steps of B and A at the peaks of a device, beside the measured one.

    ``ratio`` is 1 and the sum of ``causes``: the value model's weights, prefixes and arithmetic beyond these, the
    sampling of guidance, and ``other work``, the change of the base model's own floor with batch and contexts.
    """

    ratio: float
    causes: Mapping[str, float]
    measured: float
    """Ratio of the measured mean steps."""
    interval: tuple[float, float] | None
    """Of ``measured``; None for one block."""
    a_times_floor: float
    """The measured step of A over its floor. A large one hides guidance: beside a slow base, it is small."""
    added_s: float
    """Measured step of B less that of A."""
    floor_added_s: float
    """The same of the floors: the part of ``added_s`` that no implementation avoids beside the same base."""
    hardware: str

    @property
    def times_floor(self) -> float:
        """The measured ratio over that of the floors. Below 1 where A stays farther behind its floor than B."""
        return self.measured / self.ratio
