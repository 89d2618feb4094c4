"""The capacities of two arms as a cell of a comparison, which decides in place of their loads."""

from collections.abc import Mapping, Sequence

from benchctl.analysis.compare.metric import MetricComparison, Rules, compare_metric
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.experiment.capacity import CapacityPair, capacity_pairs
from benchctl.analysis.experiment.pairing import ArmPair
from benchctl.analysis.metrics.latency import known_values
from benchctl.analysis.statistics.estimate import UNORDERED
from benchctl.errors import UsageError
from benchctl.profile.objective import CAPACITIES


def compared_capacities(pairs: Sequence[ArmPair], name: str) -> list[CapacityPair]:
    """The arms whose capacities are compared. Raises UsageError where their loads have no sizes or no objective."""
    capacities = capacity_pairs(pairs, name)
    if not capacities or any(side.profile.slo is None for side in pairs[0].sides):
        raise UsageError(
            f"{name} needs loads of several sizes and an objective: measure with slo and sweep.{CAPACITIES[name]}, "
            "or let other metrics decide (--metrics)"
        )
    return capacities


def compare_capacity(capacity: CapacityPair, rules: Rules) -> MetricComparison:
    """The capacities of two arms; blocks without one leave them undecided: the others are no fair sample."""
    metric, _, _, values, ratio, censored = capacity
    limits = (censored,) if censored is not None and ratio is None else ()
    compared = compare_metric(metric, "deciding", values, rules, ratio, limits=limits, unreliable=censored)
    assert compared is not None  # noqa: S101 - only exploratory metrics are left out
    return compared


def capacity_cell(
    capacity: CapacityPair, metrics: tuple[MetricComparison, ...], cells: Mapping[ArmPair, CellComparison]
) -> CellComparison:
    """The capacities of two arms, with the errors of their loads. Requests that failed are none: they broke the
    objective.
    """
    own = [cells[load] for load in capacity.loads if load.blocks]
    errors = [error for cell in own for error in cell.errors if not error.startswith("INCOMPLETE")]
    return CellComparison(
        label=capacity.pair.b.label,
        a_label=capacity.pair.a.label,
        b_label=capacity.pair.b.label,
        num_blocks=min(len(known_values(side)) for side in capacity.values),
        metrics=metrics,
        errors=tuple(errors) if own else ("no block has a usable run on both sides",),
        design=UNORDERED if capacity.ratio is None else capacity.ratio.design,
    )
