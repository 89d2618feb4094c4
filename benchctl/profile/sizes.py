"""Sizes of loads around a capacity: the rules of a profile that asks for one, and sizes by a pilot."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from benchctl.profile.arrival import RATED
from benchctl.profile.model import FactorValue, Profile
from benchctl.profile.objective import CAPACITIES, CapacitySearch, Slo
from benchctl.profile.settings import setting_of
from benchctl.profile.yaml import Problem, Steps
from benchctl.units import percentage

_STEP: Final = 1.09
"""Between inner sizes: for a queue, a line over it errs by less than half a percent of the capacity."""
_INNER: Final = (0.85, 1.18)
_OUTER: Final = (0.5, 0.7, 1.4, 2.0)


def capacity_metric(profile: Profile) -> str | None:
    """The first capacity among the primary metrics; None where there is none."""
    return next((name for name in profile.primary_metrics if name in CAPACITIES), None)


def capacity_text(profile: Profile) -> str:
    """``requests at once at which 95% keep ttft <= 200 ms and tpot <= 50 ms``, of one that asks for a capacity."""
    slo = profile.slo or Slo()
    unit = {"capacity_concurrency": "requests at once", "capacity_rate": "requests/s"}[
        capacity_metric(profile) or ""
    ]
    limits = " and ".join(f"{name} <= {limit:g} ms" for name, limit in slo.limits_ms.items())
    return f"{unit} at which {percentage(slo.share)} keep {limits}"


def size_factor(factors: Iterable[str], metric: str) -> str | None:
    """The factor that is the size of a load, of which ``metric`` is the largest; None where none is."""
    path = ("workload", "arrival", CAPACITIES[metric])
    return next((factor for factor in factors if setting_of(factor) == path), None)


def with_sizes(profile: Profile, sizes: tuple[FactorValue, ...]) -> Profile:
    """The profile with these sizes on every server, as if they were written in its sweep."""
    sweep = {**profile.sweep, CAPACITIES[capacity_metric(profile) or ""]: sizes}
    return profile.model_copy(update={"sweep": sweep, "capacity": None, "per_server": "ladder"})


def pilot_profile(profile: Profile) -> Profile:
    """The pilot: one block, sizes that double, from the smallest to the largest."""
    search = profile.capacity or CapacitySearch()
    num_doublings = int(math.log2(search.largest / search.smallest))
    pilot = with_sizes(profile, _rounded(profile, [search.smallest * 2**i for i in range(num_doublings + 1)]))
    return pilot.model_copy(update={"name": f"{profile.name}-sizes", "blocks": 1})


def capacity_sizes(profile: Profile, levels: Sequence[float] = ()) -> tuple[FactorValue, ...]:
    """Sizes around the capacities of arms: 9 % apart beside them, then farther.

    Half and twice as much bracket what launches scatter; of a rate only 1.4 times, above which a backlog grows.
    Without ``levels``, as before the pilot, they are around the middle of its range.
    """
    search = profile.capacity or CapacitySearch()
    levels = levels or [math.sqrt(search.smallest * search.largest)]
    low, high = _INNER[0] * min(levels), _INNER[1] * max(levels)
    num_steps = math.ceil(math.log(high / low) / math.log(_STEP))
    inner = [low * (high / low) ** (i / num_steps) for i in range(num_steps + 1)]
    outer = [factor * (min(levels) if factor < 1 else max(levels)) for factor in _OUTER]
    return _rounded(profile, sorted([*inner, *outer[: 4 if profile.workload.arrival.rate is None else 3]]))


def _rounded(profile: Profile, sizes: list[float]) -> tuple[FactorValue, ...]:
    """Whole slots, or rates of three digits, each once."""
    is_rate = profile.workload.arrival.rate is not None
    return tuple(dict.fromkeys(float(f"{size:.3g}") if is_rate else max(1, round(size)) for size in sizes))


def capacity_problems(profile: Profile) -> Iterator[Problem]:
    """The problems of a profile that asks for a capacity."""
    metric, kind, has_pilot = capacity_metric(profile), profile.workload.arrival.kind, profile.capacity is not None
    if metric is None:
        if has_pilot:
            yield ("capacity",), f"is read with {' or '.join(CAPACITIES)} in primary_metrics; add one, or remove it"
        return
    key = CAPACITIES[metric]
    factor = size_factor(profile.sweep, metric)
    rules: tuple[tuple[bool, Steps, str], ...] = (
        (
            kind not in RATED if key == "request_rate" else kind != "closed-loop",
            ("primary_metrics",),
            (
                f"has {metric}, and loads of arrival kind {kind} do not grow with {key}; set "
                f"workload.arrival.kind: {'poisson' if key == 'request_rate' else 'closed-loop'}, or take another "
                "metric"
            ),
        ),
        (
            not has_pilot and len(profile.sweep.get(factor or "", ())) < 3,
            ("primary_metrics",),
            (
                f"has {metric}, which lies between loads of several sizes; name three or more in sweep.{key}, or "
                "set capacity: {} for a pilot that finds them"
            ),
        ),
        (
            has_pilot and factor is not None,
            ("capacity",),
            f"finds sizes, and sweep.{factor} names them; set capacity: null, or leave the factor out",
        ),
        (
            profile.stopping is not None,
            ("stopping",),
            f"looks at single loads, and {metric} is of all loads of a block; fix the number of blocks",
        ),
    )
    yield from ((path, problem) for is_broken, path, problem in rules if is_broken)
