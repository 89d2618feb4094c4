"""Curves over the load: throughput and latencies of an arm at each of its load points, and the knee between them.

The knee is the load at which throughput / latency, the *power* of a system, is largest (L. Kleinrock, *Power and
deterministic rules of thumb for probabilistic problems in computer communications*, ICC 1979; R. Jain, *The Art of
Computer Systems Performance Analysis*, 1991). It changes neither with units nor with larger loads that are added.
In a closed loop of N open requests latency is N / throughput by Little's law, so beyond the knee twice as many open
requests give less than sqrt(2) times the throughput. A server whose step takes a + b N has it at N = a / b, where
it gives half of its most throughput at twice its least latency. The knee describes; it never decides.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from benchctl.analysis.experiment.summary import CellSummary, RunSummary
from benchctl.analysis.metrics.table import STEADY
from benchctl.analysis.statistics.estimate import (
    BlockDesign,
    Estimator,
    SideRatio,
    adjusted_level,
    level_interval,
    side_ratio,
)
from benchctl.profile.settings import load_part, server_part, setting_of
from benchctl.records.directory import arm_label, cell_name
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import MS_PER_S

SIZES: Final = {
    "workload.arrival.request_rate": "requests/s",
    "workload.arrival.max_concurrency": "open requests",
}
"""The settings that are the size of a load, with their units; a curve is over the first that was swept."""
_METRICS: Final = {
    "throughput": ("output_throughput",),
    "ttft": ("p99_ttft_ms", "ttft_ms"),
    "tpot": ("tpot_ms",),
    "speed": ("tpot_ms",),
    "e2el": ("e2el_ms",),
}
"""Metrics of each quantity, of which the first is taken that all runs know. Speed is 1000 / tpot."""
_WIDEST_GAP: Final = math.log(4)
"""Between the loads beside the knee."""


def vertex(sizes: Sequence[float], log_powers: Sequence[float]) -> float | str:
    """The size at which power is largest, or where that must be if these sizes do not tell.

    A parabola over the logarithm of the size, weighted by distance from its own vertex (the tricube of W. S.
    Cleveland, *Robust locally weighted regression*, JASA 1979), as far as 8 times its size or twice the gap to a
    neighbour. Of a step of a + b N it is within 0.2 % of the knee for loads 2 times apart, 0.8 % for 4 times.
    """
    u, best = np.log(sizes), int(np.argmax(log_powers))
    if best in (0, len(sizes) - 1):
        side, which = ("below", "smallest") if best == 0 else ("above", "largest")
        return f"{side} {sizes[best]:g}, the {which} load"
    gap, i = max((u[i + 1] - u[i], i) for i in (best - 1, best))
    if gap > _WIDEST_GAP + 1e-9:
        return f"between {sizes[i]:g} and {sizes[i + 1]:g}, which are {math.exp(gap):.3g} times apart"
    peak, reach = u[best], max(math.log(8), 2 * gap)
    for _ in range(2):
        weights = np.clip(1 - (np.abs(u - peak) / reach) ** 3, 0, None) ** 3
        curvature, slope, _ = np.polyfit(u - peak, log_powers, 2, w=np.sqrt(weights))
        peak -= slope / (2 * curvature) if curvature < 0 else math.inf
        if not u[0] <= peak <= u[-1]:
            return f"near {sizes[best]:g}, without a clear maximum"
    return math.exp(peak)


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """One arm over its load, at two sizes or more.

    The quantities are ``throughput`` and the ``speed`` that one user sees, 1000 / tpot, in tokens/s, and the
    latencies ``ttft``, ``tpot`` and ``e2el`` in ms, as far as all runs know them.
    """

    label: str
    """Of the arm, without its load."""
    workload: str
    """Other factors of the load, as ``input_len=512``; empty without."""
    factor: str
    unit: str
    """Of the size."""
    cells: Mapping[float, CellSummary]
    """By size, the smallest first."""
    metrics: Mapping[str, str]
    """The metric that was taken for each quantity."""
    confidence: float
    """Of each interval."""
    estimator: Estimator

    def blocks(self, size: float, quantity: str) -> dict[int, float]:
        """The values of single blocks, as measured."""
        values = {run.record.block: run.counted(self.metrics[quantity]) for run in self.cells[size].runs}
        return {block: _in_unit(quantity, value) for block, value in values.items() if value}

    @cached_property
    def levels(self) -> Mapping[float, Mapping[str, Estimate]]:
        """Centres over blocks by size and quantity, with intervals where there are enough blocks."""
        return {size: {name: self._level(cell, name) for name in self.metrics} for size, cell in self.cells.items()}

    def _level(self, cell: CellSummary, quantity: str) -> Estimate:
        name = self.metrics[quantity]
        centre, values = cell.spreads[name].centre, [run.counted(name) for run in cell.runs]
        ends = level_interval(values, centre, self.confidence) or ()
        return Estimate(_in_unit(quantity, centre), *sorted(_in_unit(quantity, end) for end in ends))

    @cached_property
    def knees(self) -> Mapping[int, float | str]:
        """The size at the knee, or where it must be, in each block that has all sizes."""
        powers: dict[int, list[float]] = {}
        for run in (
            run for cell in self.cells.values() for run in cell.runs if run.usability.client_excluded is None
        ):
            throughput, latency = (
                (run.counted(name) or math.nan) * run.experiment.position_scale(run.run, name)
                for name in (self.metrics["throughput"], self.metrics["e2el"])
            )
            powers.setdefault(run.record.block, []).append(math.log(throughput / latency))
        whole = {block: of_block for block, of_block in powers.items() if len(of_block) == len(self.cells)}
        return {block: vertex([*self.cells], of_block) for block, of_block in sorted(whole.items())}

    @cached_property
    def knee(self) -> Estimate | str:
        """Centre over blocks and interval, or the reason why some block has none: the others would be biased."""
        reasons = Counter(knee for knee in self.knees.values() if isinstance(knee, str))
        sizes = [knee for knee in self.knees.values() if not isinstance(knee, str)]
        if reasons or not sizes:
            (where, number), *_ = reasons.most_common(1) or [("no block has all loads", 0)]
            return f"{where}, in {number} of {len(self.knees)} blocks" if number else where
        return knee_level(sizes, self.confidence, self.estimator)

    def at(self, size: float) -> dict[str, float]:
        """The quantities at a size within the curve: straight lines between points in logarithms."""
        sizes = np.log([*self.cells])
        logs = {name: np.log([level[name].value for level in self.levels.values()]) for name in self.metrics}
        return {name: math.exp(np.interp(math.log(size), sizes, of_name)) for name, of_name in logs.items()}


def _in_unit(quantity: str, value: float) -> float:
    return MS_PER_S / value if quantity == "speed" else value


def knee_level(sizes: Sequence[float], confidence: float, estimator: Estimator) -> Estimate:
    """The centre of the knees of blocks and its interval."""
    centre, _ = adjusted_level(sizes, None, None, estimator)
    return Estimate(centre, *(level_interval(sizes, centre, confidence) or ()))


def knee_ratio(a: Curve, b: Curve) -> SideRatio | None:
    """Knee of B over that of A in the blocks of both; None where either curve has none."""
    if isinstance(a.knee, str) or isinstance(b.knee, str):
        return None
    blocks = tuple(sorted(a.knees.keys() & b.knees.keys()))
    of_a, of_b = ([float(curve.knees[block]) for block in blocks] for curve in (a, b))
    return side_ratio(of_a, of_b, BlockDesign(blocks), a.confidence, a.estimator)


def curves_of(cells: Sequence[CellSummary], confidence: float, estimator: Estimator) -> tuple[Curve, ...]:
    """The curve of each arm over its load, the baseline first; none where no size of a load was swept, and where
    throughput or latency of a run is unknown.
    """
    timed = [cell for cell in cells if cell.centre("output_throughput")]
    factors = {".".join(setting_of(factor)): factor for cell in timed for factor in cell.cell}
    setting = next((setting for setting in SIZES if setting in factors), None)
    metrics = _metrics_of([run for cell in timed for run in cell.runs if run.usability.client_excluded is None])
    if setting is None or not {"throughput", "e2el"} <= metrics.keys():
        return ()
    factor, arms = factors[setting], dict[tuple[str, str], dict[float, CellSummary]]()
    for cell in timed:
        others = {name: value for name, value in load_part(cell.cell).items() if name != factor}
        if isinstance(size := cell.cell.get(factor), int | float):
            key = arm_label(cell.variant, server_part(cell.cell)), cell_name(others)
            arms.setdefault(key, {})[size] = cell
    return tuple(
        Curve(
            label=label,
            workload=workload,
            factor=factor,
            unit=SIZES[setting],
            cells={size: of_arm[size] for size in sorted(of_arm)},
            metrics=metrics,
            confidence=confidence,
            estimator=estimator,
        )
        for (label, workload), of_arm in arms.items()
        if len(of_arm) > 1
    )


def _metrics_of(runs: Sequence[RunSummary]) -> dict[str, str]:
    """The metric of each quantity that all runs know: all in steady windows, or all of whole loads."""

    def first_known(names: Iterable[str]) -> str | None:
        return next((name for name in names if all(run.experiment.counted(run.run, name) for run in runs)), None)

    steady = {
        quantity: first_known(STEADY[name] for name in names if name in STEADY)
        for quantity, names in _METRICS.items()
    }
    whole = {quantity: first_known(names) for quantity, names in _METRICS.items()}
    return {quantity: name for quantity, name in (steady if all(steady.values()) else whole).items() if name}
