"""Fisher's exact test of two shares."""

from fractions import Fraction
from math import comb
from typing import NamedTuple


class Share(NamedTuple):
    """So many of a number of trials."""

    successes: int
    trials: int


def fisher_one_sided(larger: Share, smaller: Share) -> float:
    """Probability of a share of ``larger`` at least as far above that of ``smaller``, if both are draws from one.

    R. A. Fisher, *Statistical Methods for Research Workers*, 1934: the tail of the hypergeometric distribution with
    both totals fixed. 1 without trials.
    """
    total = larger.successes + smaller.successes
    ways = comb(larger.trials + smaller.trials, total)
    tail = sum(
        comb(larger.trials, count) * comb(smaller.trials, total - count)
        for count in range(larger.successes, min(total, larger.trials) + 1)
    )
    return float(Fraction(tail, ways))
