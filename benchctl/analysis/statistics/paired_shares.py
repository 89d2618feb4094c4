"""Statistics of two sides that answered the same questions, with the question as the unit.

Several answers to one question (samples, blocks) depend on each other, so each question counts once, with the mean
of its answers. Shares are in [0, 1].
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean, stdev
from typing import Final

import numpy as np
from scipy.special import ndtri

from benchctl.analysis.statistics.intervals import Interval, t_quantile

POWER: Final = 0.8
_MAX_ADDITIONS: Final = 1 << 25
"""Up to so many, the distribution of a sum is enumerated; beyond, many questions get a normal approximation."""


def pass_at(k: int, num_correct: int, num_samples: int) -> float:
    """Probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k), for k <= n samples, c of them right.

    Unbiased, unlike 1 - (1 - c / n)^k. As a product, because the binomials overflow: M. Chen et al., *Evaluating
    large language models trained on code*, 2021, section 2.1.
    """
    if num_samples - num_correct < k:
        return 1.0
    return 1 - math.prod((i - k) / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def wilson_interval(num_correct: int, num_questions: int, confidence: float) -> Interval:
    """E. B. Wilson's interval of a share (JASA 22, 1927): the shares that a score test does not reject."""
    z, n = float(ndtri((1 + confidence) / 2)), num_questions
    centre = (2 * num_correct + z**2) / (2 * (n + z**2))
    half = z * math.sqrt(z**2 + 4 * num_correct * (1 - num_correct / n)) / (2 * (n + z**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe_interval(both: int, only_a: int, only_b: int, neither: int, confidence: float) -> Interval:
    """Interval of the difference of two paired shares, B - A, one answer per question.

    Wilson's limits of the two shares, squared and added, with their correlation phi: method 10 of R. G. Newcombe,
    *Improved confidence intervals for the difference between binomial proportions based on paired data*, Statistics
    in Medicine 17, 1998, 2635-2650. The arguments count questions that both sides, one, or neither got right.
    """
    n = both + only_a + only_b + neither
    share_a, share_b = (both + only_a) / n, (both + only_b) / n
    low_a, high_a = wilson_interval(both + only_a, n, confidence)
    low_b, high_b = wilson_interval(both + only_b, n, confidence)
    phi = _phi(both, only_a, only_b, neither)
    difference = share_b - share_a
    reaches = []
    for one, other in ((share_b - low_b, high_a - share_a), (high_b - share_b, share_a - low_a)):
        reaches.append(math.sqrt(max(0.0, one**2 - 2 * phi * one * other + other**2)))
    return max(-1.0, difference - reaches[0]), min(1.0, difference + reaches[1])


def _phi(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Correlation of the two sides; a positive one is corrected for continuity, 0 where a margin is empty."""
    n = both + only_a + only_b + neither
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if margins == 0:
        return 0.0
    excess = both * neither - only_a * only_b
    return (max(excess - n / 2, 0) if excess > 0 else excess) / math.sqrt(margins)


def mean_interval(differences: Sequence[Fraction], confidence: float) -> Interval:
    """Student's t over the questions.

    Where all differences are equal it would claim certainty; the interval then has the width of the share of
    questions that may still differ: Wilson's limit for none of n.
    """
    n, values = len(differences), [float(value) for value in differences]
    mean = fmean(values)
    if len(set(differences)) == 1:
        half = wilson_interval(0, n, confidence)[1]
    else:
        half = t_quantile((1 + confidence) / 2, n - 1) * stdev(values) / math.sqrt(n)
    return max(-1.0, mean - half), min(1.0, mean + half)


def sign_flip_p(differences: Sequence[Fraction]) -> float:
    """Two-sided exact test that the differences of questions are symmetric around 0.

    The probability that |sum| reaches the observed one when each sign is a fair coin, enumerated over all possible
    sums. With one answer per question it is the exact test of McNemar (Psychometrika 12, 1947).
    """
    nonzero = [value for value in differences if value]
    if not nonzero:
        return 1.0
    scale = math.lcm(*(value.denominator for value in nonzero))
    steps = [abs(int(value * scale)) for value in nonzero]
    divisor = math.gcd(*steps)
    steps = [step // divisor for step in steps]
    observed, width = abs(int(sum(nonzero) * scale)) // divisor, sum(steps)
    if width * len(steps) > _MAX_ADDITIONS:
        return math.erfc(observed / math.sqrt(sum(step**2 for step in steps)) / math.sqrt(2))
    chances = np.ones(1)
    for step in steps:
        wider = np.zeros(len(chances) + 2 * step)
        wider[: len(chances)] = chances / 2
        wider[2 * step :] += chances / 2
        chances = wider
    return min(1.0, float(chances[: width - observed + 1].sum() + chances[width + observed :].sum()))


def minimum_detectable_difference(differences: Sequence[Fraction], confidence: float) -> float:
    """The smallest difference of shares that these questions detect with a power of 0.8.

    (z(1 - alpha / 2) + z(power)) * sqrt(mean d^2 / n): with one answer per question, mean d^2 is the share of
    questions on which the sides disagree. Without any, one is assumed.
    """
    n = len(differences)
    square = (float(sum(value**2 for value in differences)) or 1.0) / n
    return float(ndtri((1 + confidence) / 2) + ndtri(POWER)) * math.sqrt(square / n)
