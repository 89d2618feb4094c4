"""Curves over the load: throughput and latencies of an arm at each of its load points, and the knee between them.

The knee is the load at which throughput / latency, the *power* of a system, is largest (L. Kleinrock, *Power and
deterministic rules of thumb for probabilistic problems in computer communications*, ICC 1979; R. Jain, *The Art of
Computer Systems Performance Analysis*, 1991). It changes neither with units nor with larger loads that are added.
In a closed loop of N open requests latency is N / throughput by Little's law, so beyond the knee twice as many open
requests give less than sqrt(2) times the throughput. A server whose step takes a + b N has it at N = a / b, where
it gives half of its most throughput at twice its least latency. The knee describes; it never decides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import in_window
from benchctl.analysis.experiment.summary import CellSummary
from benchctl.analysis.statistics.estimate import estimate_paired, level_interval
from benchctl.profile.settings import setting_of
from benchctl.records.directory import arm_label
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import MS_PER_S

SIZES: Final = {
    ("workload", "arrival", "request_rate"): "requests/s",
    ("workload", "arrival", "max_concurrency"): "open requests",
}
"""The settings that are the size of a load, with their units; a curve is over the first that was swept."""
_METRICS: Final = {"throughput": "output_throughput", "ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2el_ms"}
_WIDEST_GAP: Final = math.log(4)
"""Between the loads beside the knee."""
_SHARPEST: Final = 0.9
"""Curvature of ln(power) over ln(size) at the largest power; that of a step of a + b N is at most 1/2."""


def vertex(sizes: Sequence[float], log_powers: Sequence[float]) -> float | str:
    """The size at which power is largest, or where that must be if these sizes do not tell.

    A parabola over the logarithm of the size, weighted by distance from its own vertex (the tricube of W. S.
    Cleveland, *Robust locally weighted regression*, JASA 1979), as far as 8 times its size or twice the gap to a
    neighbour. Of a step of a + b N it is within 0.2 % of the knee for loads 2 times apart, 0.8 % for 4 times.
    """
    u, best = np.log(sizes), int(np.argmax(log_powers))
    if best in (0, len(sizes) - 1):
        return f"beyond {sizes[best]:g}, the {'largest' if best else 'smallest'} load"
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


def corner(sizes: Sequence[float], log_powers: Sequence[float]) -> float | None:
    """The size at which the power of a closed loop turns at once from growing to falling, as where all slots are
    taken: a parabola has its vertex far below. None where it bends.
    """
    u, best = np.log(sizes), int(np.argmax(log_powers))
    reach = np.diff(u)[max(best - 1, 0) : best + 1].max(initial=math.log(2))
    low, high = np.interp([u[best] - reach, u[best] + reach], u, log_powers)
    return sizes[best] if (2 * log_powers[best] - low - high) / reach**2 > _SHARPEST else None


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """One arm over its load, at two sizes or more."""

    label: str
    """Of the arm and its load, without the size."""
    factor: str
    unit: str
    """Of the size."""
    experiment: Experiment
    cells: Mapping[float, CellSummary]
    """By size, the smallest first."""
    metrics: Mapping[str, str]
    """By quantity: of whole loads, or of their steady windows."""
    confidence: float
    """Of each interval."""

    @cached_property
    def levels(self) -> Mapping[float, Mapping[str, Estimate]]:
        """Centres over blocks by size and quantity, with intervals where there are enough blocks.

        ``throughput`` and the ``speed`` that one user sees, 1000 / tpot, are in tokens/s, ``ttft``, ``tpot`` and
        ``e2el`` in ms.
        """
        return {size: self._levels(cell) for size, cell in self.cells.items()}

    def _levels(self, cell: CellSummary) -> dict[str, Estimate]:
        levels = {}
        for quantity, name in self.metrics.items():
            centre, values = cell.spreads[name].centre, [run.counted(name) for run in cell.runs]
            levels[quantity] = Estimate(centre, *(level_interval(values, centre, self.confidence) or ()))
        tpot = levels["tpot"]
        speed = Estimate(*(MS_PER_S / end for end in (tpot.value, tpot.high, tpot.low) if end))
        return levels | {"speed": speed}

    @cached_property
    def knees(self) -> Mapping[int, float | str]:
        """The size at the knee, or where it must be, in each block that has all sizes."""
        powers: dict[int, list[float]] = {}
        for run in (run for cell in self.cells.values() for run in cell.runs if run.counted(self.metrics["e2el"])):
            throughput, latency = (
                (run.counted(name) or math.nan) * self.experiment.position_scale(run.run, name)
                for name in (self.metrics["throughput"], self.metrics["e2el"])
            )
            powers.setdefault(run.record.block, []).append(math.log(throughput / latency))
        return {
            block: vertex([*self.cells], of_block)
            for block, of_block in sorted(powers.items())
            if len(of_block) == len(self.cells)
        }

    @cached_property
    def knee(self) -> Estimate | str:
        """Centre over blocks and interval, or the reason why some block has none: the others would be biased."""
        if not self.knees:
            return "no block has all loads"
        if reasons := [knee for knee in self.knees.values() if isinstance(knee, str)]:
            where = max(reasons, key=reasons.count)
            blocks = f"{reasons.count(where)} of {len(self.knees)} blocks"
            return f"{where}, in {blocks}; add such loads to sweep.{self.factor}"
        powers = {size: math.log(of["throughput"].value / of["e2el"].value) for size, of in self.levels.items()}
        if self.unit == "open requests" and (size := corner([*powers], [*powers.values()])):
            return f"a corner near {size:g}, beyond which throughput does not grow"
        logs = [math.log(knee) for knee in self.knees.values() if not isinstance(knee, str)]
        estimate = estimate_paired(logs, self.confidence, estimator=self.experiment.estimator)
        return Estimate(estimate.ratio, estimate.ci_low, estimate.ci_high)

    def at(self, size: float, quantity: str) -> float:
        """A quantity between two points, straight in logarithms; beyond the ends that of the end."""
        values = [levels[quantity].value for levels in self.levels.values()]
        return math.exp(np.interp(math.log(size), np.log([*self.cells]), np.log(values)))


def curves_of(cells: Sequence[CellSummary], experiment: Experiment, confidence: float) -> tuple[Curve, ...]:
    """The curve of each arm over its load, the baseline first; none where no size of a load was swept, and where a
    run does not know one of the quantities.
    """
    timed = [cell for cell in cells if cell.centre("output_throughput")]
    factors = {setting_of(factor): factor for cell in timed for factor in cell.cell}
    setting = next((setting for setting in SIZES if setting in factors), None)

    def all_know(metric: str) -> bool:
        return all(
            run.counted(metric) for cell in timed for run in cell.runs if run.usability.client_excluded is None
        )

    metrics = in_window([*_METRICS.values()], experiment.profile_or_none, all_know)
    if setting is None or not all(map(all_know, metrics)):
        return ()
    factor, arms = factors[setting], dict[str, dict[float, CellSummary]]()
    for cell in timed:
        others = {name: value for name, value in cell.cell.items() if name != factor}
        if isinstance(size := cell.cell.get(factor), int | float):
            arms.setdefault(arm_label(cell.variant, others), {})[size] = cell
    return tuple(
        Curve(
            label=label,
            factor=factor,
            unit=SIZES[setting],
            experiment=experiment,
            cells=of_arm,
            metrics=dict(zip(_METRICS, metrics, strict=True)),
            confidence=confidence,
        )
        for label, of_arm in arms.items()
        if len(of_arm) > 1
    )
