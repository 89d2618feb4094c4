"""Tokens per step of speculative decoding, from the acceptance of each drafted position.

A step verifies K drafted tokens of a sequence. It yields those before the first rejection, and one more: the token
that replaces the rejected one or, if all are accepted, the bonus token, which the verification computes anyway.
Without a bonus token a step whose drafts are all accepted yields K.

With P(i) the probability that the first i drafts are accepted:

    E  = sum of P(i) for i = 0..K        with bonus token
    E0 = sum of P(i) for i = 0..K-1      without

For one acceptance a at every position these are (1 - a^(K+1)) / (1 - a) and (1 - a^K) / (1 - a) (Leviathan et al.,
arXiv 2211.17192, equation 1).
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from benchctl.errors import UsageError


def survival(acceptance: Sequence[float]) -> tuple[float, ...]:
    """Probability that the first i drafts are accepted, for i = 0..K.

    ``acceptance[i]`` is the probability that draft i + 1 is accepted when all before it are. Raises UsageError for
    a probability outside of 0 to 1.
    """
    for position, probability in enumerate(acceptance, start=1):
        if not 0 <= probability <= 1:
            raise UsageError(f"acceptance {probability:g} at position {position}: it is a probability from 0 to 1")
    return tuple(accumulate(acceptance, mul, initial=1.0))


def tokens_per_step(acceptance: Sequence[float], *, bonus: bool) -> float:
    """Expected tokens that one sequence gains in one step with ``len(acceptance)`` drafts; 1 without any."""
    probabilities = survival(acceptance)
    return sum(probabilities) if bonus or not acceptance else sum(probabilities[:-1])
