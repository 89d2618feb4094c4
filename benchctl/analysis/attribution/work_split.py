"""The difference of two mean steps, by model: more FLOPs and bytes at the peaks, and the rest.

The difference of the floors (``roofline.py``) is explained by more FLOPs and bytes; the rest is launches, host
work, synchronisation and kernels below the peaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchctl.analysis.attribution.estimate import Contribution, PairDesign, estimate_levels
from benchctl.analysis.attribution.roofline import Floor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSplit:
    """Mean time of a step: ``base``, ``value`` and ``draft`` model at their floors and the ``rest`` add up to
    ``whole``. ``draft`` is None where neither side has a draft model of known shape.

    ``hardware`` names the device whose peaks the model uses, and says when they were measured if they were.
    """

    whole: Contribution
    base: Contribution
    value: Contribution
    draft: Contribution | None
    rest: Contribution
    hardware: str
    a_compute_frac: float
    b_compute_frac: float

    @property
    def parts(self) -> tuple[Contribution, ...]:
        return (*self._models, self.rest)

    @property
    def work(self) -> Contribution:
        """All models at their floors."""
        return Contribution(name="FLOPs and bytes", added_s=sum(part.added_s for part in self._models))

    @property
    def _models(self) -> tuple[Contribution, ...]:
        return (self.base, self.value) if self.draft is None else (self.base, self.value, self.draft)

    @property
    def unexplained_frac(self) -> float | None:
        """Share of the difference that neither FLOPs nor bytes explain; None without a difference."""
        return self.rest.share_of(self.whole)


@dataclass(frozen=True, slots=True)
class FlooredRun:
    """Mean step time of a run and its floor."""

    step_s: float
    floor: Floor


def split_work(a: Sequence[FlooredRun], b: Sequence[FlooredRun], design: PairDesign) -> WorkSplit:
    """The difference of mean step times, by model: more FLOPs and bytes, and the rest."""

    def values(run: FlooredRun) -> tuple[float, ...]:
        floor = run.floor
        return run.step_s, floor.base_s, floor.value_s, floor.draft_s, run.step_s - floor.total_s

    names = ("step", *(f"{model} model's FLOPs and bytes" for model in ("base", "value", "draft")), "rest")
    whole, base, value, draft, rest = estimate_levels(names, a, b, values, design)
    return WorkSplit(
        whole=whole,
        base=base,
        value=value,
        draft=draft if any(run.floor.draft_s for run in (*a, *b)) else None,
        rest=rest,
        hardware=" and ".join(sorted({run.floor.hardware for run in (*a, *b)})),
        a_compute_frac=float(np.mean([run.floor.compute_frac for run in a])),
        b_compute_frac=float(np.mean([run.floor.compute_frac for run in b])),
    )
