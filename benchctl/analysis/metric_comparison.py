"""One metric in one cell: the values of each block on both sides, the estimate, the verdict and its reason."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, stdev
from typing import Final, Literal, TypeAlias

from benchctl.analysis.metric_table import METRICS, Metric
from benchctl.analysis.statistics import (
    MAX_BLOCKS_NEEDED,
    RatioEstimate,
    Verdict,
    blocks_for_verdict,
    estimate_paired,
    estimate_unpaired,
    log_ratios,
    verdict_of,
)

MetricVerdict: TypeAlias = Verdict | Literal["equal", "different", "unknown"]
"""``equal`` and ``different`` are those of exact metrics; ``unknown`` is a metric that was not recorded."""

Role: TypeAlias = Literal["deciding", "exact", "exploratory"]
"""``deciding`` metrics make the verdict, ``exact`` ones can only make the comparison invalid."""

FORCED_EXACT: Final = frozenset({"output_tokens"})
"""Exact as well when the length of each output is forced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How metrics are judged."""

    margin_frac: float
    confidence: float
    is_paired: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """``a`` and ``b`` are means over the blocks, geometric where all are positive: b / a is then the ratio.

    Where a block is known on one side only, it is in that side's mean and not in the estimate.
    """

    metric: Metric
    role: Role
    verdict: MetricVerdict
    a_blocks: tuple[float | None, ...]
    b_blocks: tuple[float | None, ...]
    estimate: RatioEstimate | None = None
    reason: str | None = None

    @property
    def a(self) -> float | None:
        return mean_of_blocks(self.a_blocks)

    @property
    def b(self) -> float | None:
        return mean_of_blocks(self.b_blocks)


def mean_of_blocks(values: Sequence[float | None]) -> float | None:
    """Geometric mean of the known values, arithmetic where one is not positive, None where none is known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return geometric_mean(known) if min(known) > 0 else fmean(known)


def spread_of_blocks(values: Sequence[float | None]) -> float | None:
    """Relative scatter over blocks: standard deviation of the logarithms, None below two positive values."""
    known = [value for value in values if value is not None]
    return stdev(math.log(value) for value in known) if len(known) > 1 and min(known) > 0 else None


def roles_of(deciding: Sequence[str], *, is_forced: bool) -> dict[str, Role]:
    """Role of each metric, deciding ones first. vLLM's second names of the means are left out."""
    exact = {name for name, metric in METRICS.items() if metric.is_exact or (is_forced and name in FORCED_EXACT)}
    aliases = {f"mean_{name}" for name in METRICS}
    roles: dict[str, Role] = dict.fromkeys((name for name in deciding if name not in exact), "deciding")
    roles |= dict.fromkeys((name for name in METRICS if name in exact), "exact")
    others = (name for name in METRICS if name not in roles and name not in aliases)
    return roles | dict.fromkeys(others, "exploratory")


def compare_metrics(
    a_runs: Sequence[Mapping[str, float | None]],
    b_runs: Sequence[Mapping[str, float | None]],
    roles: Mapping[str, Role],
    rules: Rules,
) -> tuple[MetricComparison, ...]:
    """Compare each metric; exploratory ones that neither side recorded are left out."""
    found = []
    for name, role in roles.items():
        a_blocks, b_blocks = tuple(run[name] for run in a_runs), tuple(run[name] for run in b_runs)
        compared = (_compare_exactly if role == "exact" else _compare_ratio)(name, role, a_blocks, b_blocks, rules)
        if role != "exploratory" or any(value is not None for value in (*a_blocks, *b_blocks)):
            found.append(compared)
    return tuple(found)


Blocks: TypeAlias = tuple[float | None, ...]


def _compare_exactly(name: str, role: Role, a: Blocks, b: Blocks, rules: Rules) -> MetricComparison:
    """Equal in every block, or different: a count has no noise."""
    known = None not in (*a, *b) and a and b
    is_equal = a == b if rules.is_paired else len({*a, *b}) == 1
    verdict: MetricVerdict = "unknown" if not known else "equal" if is_equal else "different"
    return MetricComparison(metric=METRICS[name], role=role, verdict=verdict, a_blocks=a, b_blocks=b)


def _compare_ratio(name: str, role: Role, a: Blocks, b: Blocks, rules: Rules) -> MetricComparison:
    metric = METRICS[name]
    known_a, known_b = _known(a, b, rules)
    estimate, reason = None, None
    verdict: MetricVerdict = "inconclusive"
    if not known_a or not known_b:
        verdict, reason = "unknown", f"needs {metric.needs}"
    elif min(*known_a, *known_b) <= 0:
        if len({*known_a, *known_b}) == 1:
            verdict = "equal"
        else:
            reason = "a value of zero has no ratio"
    else:
        estimate = _estimate(known_a, known_b, rules)
        verdict = verdict_of(estimate, rules.margin_frac, metric.direction)
        if verdict == "inconclusive":
            reason = why_inconclusive(estimate, rules.margin_frac)
    return MetricComparison(
        metric=metric, role=role, verdict=verdict, a_blocks=a, b_blocks=b, estimate=estimate, reason=reason
    )


def _known(a: Blocks, b: Blocks, rules: Rules) -> tuple[list[float], list[float]]:
    """Known values of each side; when paired, only blocks known on both."""
    if not rules.is_paired:
        return [value for value in a if value is not None], [value for value in b if value is not None]
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _estimate(a: Sequence[float], b: Sequence[float], rules: Rules) -> RatioEstimate:
    if rules.is_paired:
        return estimate_paired(log_ratios(a, b), rules.confidence)
    return estimate_unpaired(a, b, rules.confidence)


def why_inconclusive(estimate: RatioEstimate, margin_frac: float) -> str:
    """What is missing for a verdict, in blocks where that can be said."""
    if estimate.ci_low is None:
        return f"{estimate.num_blocks} block: at least 2 are needed for an interval, 6 for p < 0.05"
    across = f"the interval reaches across the margin of {margin_frac * 100:.3g}%"
    needed = blocks_for_verdict(estimate, margin_frac)
    if needed is None:
        return (
            f"{across}; not even {MAX_BLOCKS_NEEDED} blocks would tell: the scatter is too large, or the change "
            "too close to the margin"
        )
    return f"{across}; about {needed - estimate.num_blocks} more blocks, if ratio and scatter stay as they are"


def wall_split(
    a_runs: Sequence[Mapping[str, float | None]], b_runs: Sequence[Mapping[str, float | None]]
) -> dict[str, float] | None:
    """Why the wall time changed: ratio of wall_s = ratio of num_steps * ratio of step_ms * remainder.

    Ratios of geometric means over the blocks; exact in logarithms. The remainder is time in which no step ran,
    or steps that overlapped. None unless all three are known and positive in each block.
    """
    ratios = {}
    for name in ("wall_s", "num_steps", "step_ms"):
        a, b = [run[name] for run in a_runs], [run[name] for run in b_runs]
        known_a, known_b = [v for v in a if v is not None and v > 0], [v for v in b if v is not None and v > 0]
        if not a or not b or len(known_a) < len(a) or len(known_b) < len(b):
            return None
        ratios[name] = geometric_mean(known_b) / geometric_mean(known_a)
    ratios["remainder"] = ratios["wall_s"] / (ratios["num_steps"] * ratios["step_ms"])
    return ratios
