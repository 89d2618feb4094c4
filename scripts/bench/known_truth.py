"""An experiment of which the truth is known, through the code that plans and judges real ones.

Orders and places are those of ``plan_runs``; values are made; estimates, verdicts and the correction for several
tests are those of ``benchctl compare``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

import numpy as np
from named_noise import NOISES, Noise

from benchctl.analysis.compare import corrected
from benchctl.analysis.comparison import CellComparison
from benchctl.analysis.metric_comparison import UNORDERED, BlockDesign, MetricComparison, Rules, compare_metrics
from benchctl.profile.load import load_profile
from benchctl.profile.model import Profile
from benchctl.profile.plan import plan_runs
from benchctl.records.directory import arm_label

BLOCK_LOG_SD: Final = 0.05
"""Of what all runs of a block have in common: the day, the room, the neighbours."""
METRICS: Final = ("step_ms", "tpot_ms", "wall_s")
CONFIDENCE: Final = 0.95

Arm: TypeAlias = tuple[dict[str, float], ...]
"""The metrics of one arm, block by block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How an experiment is made: the true change (a fraction) is the same in every cell and metric."""

    noise: str = "gaussian"
    num_blocks: int = 8
    ratio_sd: float = 0.02
    change_frac: float = 0.0
    margin_frac: float = 0.01
    num_metrics: int = 1
    is_sweep: bool = False
    """Six arms instead of two: a baseline and top_k 1 to 5."""

    @property
    def truth(self) -> float:
        return math.log1p(self.change_frac)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Values of each arm, the baseline first; for each other arm its place in each block less the baseline's."""

    arms: tuple[Arm, ...]
    places: tuple[tuple[int, ...], ...]


def named_stream(*name: object) -> np.random.Generator:
    """The stream of a name, the same on every machine."""
    return np.random.default_rng(list("/".join(map(str, name)).encode()))


@cache
def _profile(*, is_sweep: bool) -> Profile:
    return load_profile("topk-sweep" if is_sweep else "aa")


def make(made: Made, stream: np.random.Generator) -> Experiment:
    """An experiment in an order of its own, planned as a profile with that seed would be."""
    changes = {"seed": int(stream.integers(2**31)), "blocks": made.num_blocks}
    plan = plan_runs(_profile(is_sweep=made.is_sweep).model_copy(update=changes))
    labels = [arm_label(run.variant, run.cell) for run in plan.runs]
    arms = sorted(set(labels), key=lambda label: (not label.startswith("baseline"), label))
    logs = _logs(NOISES[made.noise], made, stream, len(plan.runs))
    where = {(label, run.block): run for label, run in zip(labels, plan.runs, strict=True)}
    values: list[Arm] = []
    places: list[tuple[int, ...]] = []
    for arm in arms:
        own = [where[arm, block] for block in range(made.num_blocks)]
        change = 0.0 if arm == arms[0] else made.truth
        values.append(tuple({name: math.exp(change + logs[name][run.index]) for name in logs} for run in own))
        places.append(tuple(run.position - where[arms[0], run.block].position for run in own))
    return Experiment(tuple(values), tuple(places[1:]))


def _logs(noise: Noise, made: Made, stream: np.random.Generator, num_runs: int) -> dict[str, np.ndarray]:
    """For each metric: what its block adds to every run of it, and the noise of the runs."""
    num_arms = num_runs // made.num_blocks
    return {
        name: np.repeat(stream.normal(0, BLOCK_LOG_SD, made.num_blocks), num_arms)
        + noise(stream, num_runs, made.ratio_sd)
        for name in METRICS[: made.num_metrics]
    }


def judge(experiment: Experiment, made: Made) -> tuple[MetricComparison, ...]:
    """As ``compare`` judges: every metric of every cell, corrected together."""
    rules = Rules(margin_frac=made.margin_frac, confidence=CONFIDENCE, is_paired=True, noise={})
    blocks = tuple(range(made.num_blocks))
    a, *others = experiment.arms
    return _judged(
        [
            compare_metrics(a, b, _roles(made), rules, BlockDesign(blocks, places))
            for b, places in zip(others, experiment.places, strict=True)
        ]
    )


def judge_unpaired(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], made: Made
) -> MetricComparison:
    """As ``compare`` judges two experiments that share no plan."""
    rules = Rules(margin_frac=made.margin_frac, confidence=CONFIDENCE, is_paired=False, noise={})
    return _judged([compare_metrics(a, b, _roles(made), rules, UNORDERED)])[0]


def _roles(made: Made) -> dict[str, str]:
    return dict.fromkeys(METRICS[: made.num_metrics], "deciding")


def _judged(cells: Sequence[tuple[MetricComparison, ...]]) -> tuple[MetricComparison, ...]:
    compared = [
        CellComparison(
            label=str(i), a_label="a", b_label="b", num_blocks=0, num_a_first=None, metrics=metrics, faults=()
        )
        for i, metrics in enumerate(cells)
    ]
    return tuple(metric for cell in corrected(compared, CONFIDENCE) for metric in cell.metrics)


def experiments(made: Made, num_experiments: int) -> Iterator[tuple[Experiment, tuple[MetricComparison, ...]]]:
    """Experiments and what is said of them; the same for the same ``made``."""
    stream = named_stream(made)
    for _ in range(num_experiments):
        experiment = make(made, stream)
        yield experiment, judge(experiment, made)
