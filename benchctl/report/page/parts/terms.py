"""Explanations of the numbers, which appear on hover, focus or tap.

Without scripts an explanation is the title of its element; with them it appears in the page's own style, by touch
and keyboard too.
"""

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.metrics.table import Metric
from benchctl.formats import count_of, percentage


def metric_term(metric: Metric) -> str:
    """Formula, unit and better direction."""
    better = "" if metric.direction == "none" else f"; {metric.direction} is better"
    return f"{metric.name} = {metric.formula} [{metric.unit}]{better}"


def value_term(metric: MetricComparison, name: str, num_blocks: int) -> str:
    """Formula, unit, centre and scatter of the value of one side."""
    is_paired = metric.estimate is not None and metric.estimate.is_paired
    return (
        f"{metric.metric.name} of {name}: {metric.metric.formula} [{metric.metric.unit}]. Centre ± scatter of "
        f"{count_of(num_blocks, 'block')}: mean and standard deviation of their logarithms, "
        f"{'weighted as in the change' if is_paired else 'each counting the same'}"
    )


def change_term(metric: MetricComparison) -> str:
    """The ratio behind a change, its estimator and its interval."""
    name = metric.metric.name
    if metric.estimate is None:
        return f"{name} is compared exactly, block by block: a count without noise"
    estimator = {
        "robust": "weighted mean over blocks of ln(other / baseline), in which outlying blocks count little",
        "mean": "mean over blocks of ln(other / baseline)",
        None: "median of all differences of logarithms",
    }[metric.estimate.estimator]
    return (
        f"Ratio of {name} ({metric.metric.formula}), minus 1. Ratio = exp({estimator}), in brackets its "
        f"{percentage(metric.estimate.confidence)} interval over {metric.estimate.num_blocks} blocks"
    )


def p_term(metric: MetricComparison) -> str:
    """The test that the p value belongs to."""
    if metric.estimate is not None and not metric.estimate.is_paired:
        return "p of no difference between the two sides (Mann-Whitney test, which the interval inverts)"
    return (
        "the smallest alpha at which the interval of 1 - alpha excludes no change (the interval inverts the test)"
    )


def verdict_term(metric: MetricComparison) -> str:
    """The reason for the verdict: margin or noise floor, and the confidence that several tests ask for."""
    if metric.reason:
        return metric.reason
    floor = "noise floor" if metric.margins.is_noise_floor else "margin"
    margin = f"the {floor} of {percentage(metric.margins.change_frac)}"
    inside = f"the margin of {percentage(metric.margins.equivalence_frac)}"
    interval = f"the whole {_judged(metric)}interval"
    return {
        "regression": f"{interval} is worse than {margin}",
        "improvement": f"{interval} is better than {margin}",
        "equivalent": f"{interval} is inside {inside}",
        "changed": f"{interval} is beyond {margin}; neither direction is better",
        "equal": "the same in every block",
        "different": "not the same in every block",
    }.get(metric.verdict, f"the interval reaches across {margin}")


def _judged(metric: MetricComparison) -> str:
    """The confidence at which the verdict was made, where it is higher than that of the shown interval."""
    estimate, judged = metric.estimate, metric.judged_confidence
    if estimate is None or judged is None or judged <= estimate.confidence:
        return ""
    return f"{percentage(judged, 4)} "
