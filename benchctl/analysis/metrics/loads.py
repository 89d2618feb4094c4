"""The value of a run whose server got several loads: the mean of the logarithms of their values."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, fsum, log

from benchctl.analysis.metrics.table import METRICS, STEADY


def mean_of_loads(values: Iterable[float | None], *, is_exact: bool = False) -> float | None:
    """exp of the mean of the logarithms of the known values; None without any.

    The arithmetic mean of counts (``is_exact``) and where a value is not positive, the value itself where all are
    equal.
    """
    numbers = [value for value in values if value is not None]
    if not numbers or min(numbers) == max(numbers):
        return numbers[0] if numbers else None
    if is_exact or min(numbers) <= 0:
        return fsum(numbers) / len(numbers)
    return exp(fsum(map(log, numbers)) / len(numbers))


def mean_metrics(loads: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The mean of each metric or other number over loads; of steady windows only where each load has one."""
    names = dict.fromkeys(name for load in loads for name in load)
    exact = {name for name in names if name in METRICS and METRICS[name].is_exact}
    means = {name: mean_of_loads((load.get(name) for load in loads), is_exact=name in exact) for name in names}
    in_part = {name for name in STEADY.values() if any(load.get(name) is None for load in loads)}
    return means | dict.fromkeys(in_part & names.keys())
