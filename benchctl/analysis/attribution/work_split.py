"""The difference of two mean steps, by model: more FLOPs and bytes at the peaks, and the rest.

The difference of the floors (``roofline.py``) is explained by more FLOPs and bytes; the rest is launches, host
work, synchronisation and kernels below the peaks. Where a value model guides a side, the ratio of the floors is the
least that guidance could cost beside a base model at its own floor (``StepFloor``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchctl.analysis.attribution.estimate import Contribution, PairDesign, estimate_levels
from benchctl.analysis.attribution.roofline import Floor, ValueFloor
from benchctl.analysis.statistics.block_ratio import RatioEstimate
from benchctl.analysis.statistics.side_ratio import SideRatio


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSplit:
    """Mean time of a step: ``base``, ``value`` and ``draft`` model and ``sampling`` at their floors and the
    ``rest`` add up to ``whole``. ``draft`` is None where neither side has a draft model of known shape,
    ``sampling`` (what guidance reads and writes of logits) where neither is guided.

    ``hardware`` names the device whose peaks the model uses, and says when they were measured if they were.
    """

    whole: Contribution
    base: Contribution
    value: Contribution
    sampling: Contribution | None
    draft: Contribution | None
    rest: Contribution
    hardware: str
    a_compute_frac: float
    b_compute_frac: float
    floor: "StepFloor | None" = None
    """The floors of both steps as a ratio; None where no side is guided."""

    @property
    def parts(self) -> tuple[Contribution, ...]:
        return (*self._models, self.rest)

    @property
    def work(self) -> Contribution:
        """All models at their floors."""
        return Contribution(name="FLOPs and bytes", added_s=sum(part.added_s for part in self._models))

    @property
    def _models(self) -> tuple[Contribution, ...]:
        parts = (self.base, self.value, self.sampling, self.draft)
        return tuple(part for part in parts if part is not None)

    @property
    def unexplained_frac(self) -> float | None:
        """Share of the difference that neither FLOPs nor bytes explain; None without a difference."""
        return self.rest.share_of(self.whole)


@dataclass(frozen=True, slots=True)
class FlooredRun:
    """Mean step time of a run and its floor."""

    step_s: float
    floor: Floor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Ratio of the mean steps of B and A at the peaks of a device, beside the measured one.

    ``ratio`` is 1 and the sum of ``causes``: the value model's weights, prefixes and arithmetic beyond these, the
    sampling of guidance, and ``other work``, the change of the base model's own floor with batch and contexts.
    """

    ratio: float
    causes: Mapping[str, float]
    measured: float
    """Ratio of the measured mean steps."""
    interval: tuple[float, float] | None
    """Of ``measured``; None for one block."""
    a_times_floor: float
    """The measured step of A over its floor. A large one hides guidance: beside a slow base, it is small."""
    added_s: float
    """Measured step of B less that of A."""
    floor_added_s: float
    """The same of the floors: the part of ``added_s`` that no implementation avoids beside the same base."""
    hardware: str

    @property
    def times_floor(self) -> float:
        """The measured ratio over that of the floors. Below 1 where A stays farther behind its floor than B."""
        return self.measured / self.ratio


def split_work(
    a: Sequence[FlooredRun], b: Sequence[FlooredRun], design: PairDesign, step: SideRatio | None = None
) -> WorkSplit:
    """The difference of mean step times, by model: more FLOPs and bytes, and the rest.

    ``step`` is the ratio of the comparison, for its interval.
    """

    def values(run: FlooredRun) -> tuple[float, ...]:
        floor = run.floor
        parts = (floor.base_s, floor.value_s, floor.value.sampling_s, floor.draft_s)
        return run.step_s, *parts, run.step_s - floor.total_s

    models = ("base model's", "value model's", "sampling's", "draft model's")
    names = ("step", *(f"{model} FLOPs and bytes" for model in models), "rest")
    whole, base, value, sampling, draft, rest = estimate_levels(names, a, b, values, design)
    hardware = " and ".join(sorted({run.floor.hardware for run in (*a, *b)}))
    is_guided = any(sum(run.floor.value) for run in (*a, *b))
    return WorkSplit(
        whole=whole,
        base=base,
        value=value,
        sampling=sampling if is_guided else None,
        draft=draft if any(run.floor.draft_s for run in (*a, *b)) else None,
        rest=rest,
        hardware=hardware,
        a_compute_frac=float(np.mean([run.floor.compute_frac for run in a])),
        b_compute_frac=float(np.mean([run.floor.compute_frac for run in b])),
        floor=_step_floor(a, b, None if step is None else step.estimate, hardware) if is_guided else None,
    )


def _step_floor(
    a: Sequence[FlooredRun], b: Sequence[FlooredRun], step: RatioEstimate | None, hardware: str
) -> StepFloor:
    floor_a, floor_b = (fmean(run.floor.total_s for run in side) for side in (a, b))
    step_a, step_b = (fmean(run.step_s for run in side) for side in (a, b))

    def added(cause: int) -> float:
        means = [fmean(run.floor.value[cause] for run in side) for side in (a, b)]
        return (means[1] - means[0]) / floor_a

    names = dict(
        zip(("weights", "prefixes", "arithmetic", "sampling"), range(len(ValueFloor._fields)), strict=True)
    )
    causes = {name: added(cause) for name, cause in names.items()}
    ratio = floor_b / floor_a
    interval = None if step is None or step.ci_low is None or step.ci_high is None else (step.ci_low, step.ci_high)
    return StepFloor(
        ratio=ratio,
        causes={**causes, "other work": ratio - 1 - sum(causes.values())},
        measured=step_b / step_a if step is None else step.ratio,
        interval=interval,
        a_times_floor=step_a / floor_a,
        added_s=step_b - step_a,
        floor_added_s=floor_b - floor_a,
        hardware=hardware,
    )
