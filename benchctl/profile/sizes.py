"""Sizes of loads around a capacity: the rules of a profile that asks for one, and sizes by a pilot."""

import math
from collections.abc import Iterator
from typing import Final

from benchctl.profile.model import FactorValue, Profile
from benchctl.profile.sections import CAPACITIES
from benchctl.profile.settings import setting_of
from benchctl.profile.yaml import Problem, Steps

_STEP: Final = 1.09
"""Between inner sizes: for a queue, a line over it errs by less than half a percent of the capacity."""
_INNER: Final = (0.85, 1.18)
_OUTER: Final = (0.5, 0.7, 1.4, 2.0)


def capacity_metric(profile: Profile) -> str | None:
    """The first capacity among the primary metrics; None where there is none."""
    return next((name for name in profile.primary_metrics if name in CAPACITIES), None)


def capacity_text(profile: Profile) -> str:
    """``requests at once at which 95% keep ttft <= 200 ms``, of a profile that asks for a capacity."""
    unit = {"capacity_concurrency": "requests at once", "capacity_rate": "requests/s"}[
        capacity_metric(profile) or ""
    ]
    return f"{unit} at which {'' if profile.slo is None else profile.slo.in_words}"


def _factor_of(profile: Profile, metric: str) -> str | None:
    """The factor of the sweep that is the size of a load; None where it has none."""
    path = ("workload", "arrival", CAPACITIES[metric])
    return next((factor for factor in profile.sweep if setting_of(factor) == path), None)


def needs_sizes(profile: Profile) -> bool:
    """True where a pilot has to find the sizes."""
    metric = capacity_metric(profile)
    return metric is not None and profile.capacity is not None and _factor_of(profile, metric) is None


def with_sizes(profile: Profile, sizes: tuple[FactorValue, ...]) -> Profile:
    """The profile with these sizes on every server, as if they were written in its sweep."""
    sweep = {**profile.sweep, CAPACITIES[capacity_metric(profile) or ""]: sizes}
    return profile.model_copy(update={"sweep": sweep, "capacity": None, "per_server": "ladder"})


def pilot_profile(profile: Profile) -> Profile:
    """The pilot: one block, sizes that double, from the smallest to the largest."""
    search, sizes = profile.capacity, list[float]()
    while search is not None and (size := search.smallest * 2 ** len(sizes)) <= search.largest:
        sizes.append(size)
    pilot = with_sizes(profile, _rounded(profile, sizes))
    return pilot.model_copy(update={"name": f"{profile.name}-sizes", "blocks": 1, "stopping": None})


def capacity_sizes(profile: Profile, smallest: float, largest: float) -> tuple[FactorValue, ...]:
    """Sizes around capacities of arms from ``smallest`` to ``largest``: 9 % apart beside them, then farther.

    Half and twice as much bracket what launches scatter; of a rate only 1.4 times, above which a backlog grows.
    """
    low, high = _INNER[0] * smallest, _INNER[1] * largest
    num_steps = math.ceil(math.log(high / low) / math.log(_STEP))
    inner = [low * (high / low) ** (i / num_steps) for i in range(num_steps + 1)]
    outer = [factor * (smallest if factor < 1 else largest) for factor in _OUTER]
    return _rounded(profile, sorted([*inner, *outer[: 4 if profile.workload.arrival.rate is None else 3]]))


def sizes_to_plan(profile: Profile) -> tuple[FactorValue, ...]:
    """Sizes for a plan before the pilot: around the middle of its range."""
    search = profile.capacity
    middle = 1.0 if search is None else math.sqrt(search.smallest * search.largest)
    return capacity_sizes(profile, middle, middle)


def _rounded(profile: Profile, sizes: list[float]) -> tuple[FactorValue, ...]:
    """Whole slots, or rates of three digits, each once."""
    is_rate = profile.workload.arrival.rate is not None
    return tuple(dict.fromkeys(float(f"{size:.3g}") if is_rate else max(1, round(size)) for size in sizes))


def capacity_problems(profile: Profile) -> Iterator[Problem]:
    """The problems of a profile that asks for a capacity."""
    metric, kind = capacity_metric(profile), profile.workload.arrival.kind
    if metric is None:
        if profile.capacity is not None:
            yield ("capacity",), f"is read with {' or '.join(CAPACITIES)} in primary_metrics; add one, or remove it"
        return
    key = CAPACITIES[metric]
    factor = _factor_of(profile, metric)
    sizes = profile.sweep[factor] if factor is not None else ()
    is_timed, is_rate = kind in {"trace", "burst"}, profile.workload.arrival.rate is not None
    rules: tuple[tuple[bool, Steps, str], ...] = (
        (profile.slo is None, (), f"{metric} needs an objective; set slo, such as {{ttft_ms: 200}}"),
        (
            is_timed,
            ("workload", "arrival", "kind"),
            (
                f"is {kind}, which has its own times, and {metric} needs loads of several sizes; "
                "set closed-loop or poisson"
            ),
        ),
        (
            not is_timed and is_rate != (key == "request_rate"),
            ("primary_metrics",),
            (
                f"has {metric}, and an arrival of kind {kind} has no {key} that its load grows with; "
                f"take {'capacity_rate' if is_rate else 'capacity_concurrency'}, or another arrival"
            ),
        ),
        (
            factor is None and profile.capacity is None,
            ("primary_metrics",),
            (
                f"has {metric}, which lies between loads of several sizes; name three or more in sweep.{key}, or "
                "set capacity: {} for a pilot that finds them"
            ),
        ),
        (
            factor is not None and len(sizes) < 3,
            ("sweep", factor or ""),
            f"has {len(sizes)}, and {metric} lies between sizes; name at least 3",
        ),
        (
            profile.stopping is not None,
            ("stopping",),
            f"looks at single loads, and {metric} is of all loads of a block; fix the number of blocks",
        ),
    )
    yield from ((path, problem) for is_broken, path, problem in rules if is_broken)
