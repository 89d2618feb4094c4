"""Several tests at once: every deciding metric in every cell is a chance to be wrong.

S. Holm, *A simple sequentially rejective multiple test procedure*, Scandinavian Journal of Statistics 6, 1979,
65-70: the p-values in ascending order meet alpha / m, alpha / (m - 1), ... until one fails; with it fail all that
follow. The chance that any verdict is wrong is then at most alpha, however the tests depend on one another.
"""

from collections.abc import Sequence


def holm_levels(p_values: Sequence[float], alpha: float) -> tuple[float, ...]:
    """The alpha at which each test is judged, in the order of ``p_values``.

    A test decides where its p-value is no larger. Tests after the first that fails are judged at its level.
    """
    levels = [0.0] * len(p_values)
    level, has_failed = 0.0, False
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if not has_failed:
            level = alpha / (len(p_values) - rank)
            has_failed = p_values[index] > level
        levels[index] = level
    return tuple(levels)
