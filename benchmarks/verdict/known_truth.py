"""An experiment of which the truth is known, through the code that plans and judges real ones.

Orders and positions are those of ``plan_runs``; values are made; estimates, verdicts and the correction for several
tests are those of ``benchctl compare``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.compare.metric import MetricComparison, Rules, compare_metric, judge_together
from benchctl.analysis.statistics.estimate import (
    DEFAULT_ESTIMATOR,
    BlockDesign,
    Estimator,
    PooledSlope,
    pooled_slope,
    side_ratio,
    unpaired_ratio,
)
from benchctl.profile.load import load_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import plan_runs
from benchctl.records.directory import arm_label
from benchctl.records.stores import MetricNoise
from benchmarks.verdict.named_noise import ALL, Noise

BLOCK_LOG_SD: Final = 0.05
"""Of what all runs of a block have in common: the day, the room, the neighbours."""
OWN_SHARE: Final = 0.1
METRICS: Final = ("step_ms", "tpot_ms", "wall_s")
CONFIDENCE: Final = 0.95
CHANGES: Final = frozenset({"regression", "improvement"})

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
    are_metrics_alike: bool = False
    """Whether all metrics of a run share its noise, beside a tenth of the scatter that is their own."""
    num_arms: int = 2
    """A baseline, and one cell of top_k for each of the others."""
    estimator: Estimator = DEFAULT_ESTIMATOR
    floor_frac: float = 0.0
    """Noise floor of every metric, as an A/A experiment would have left it; 0: none on file."""

    @property
    def truth(self) -> float:
        return math.log1p(self.change_frac)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Values of each arm, the baseline first, and the position of each in each block."""

    arms: tuple[Arm, ...]
    positions: tuple[tuple[int, ...], ...]


def named_stream(*name: object) -> np.random.Generator:
    """The stream of a name, the same on every machine."""
    return np.random.default_rng(list("/".join(map(str, name)).encode()))


@cache
def _profile(num_arms: int) -> Profile:
    if num_arms == 2:
        return load_profile("aa")
    return load_profile("topk-sweep", overrides=[f"sweep.top_k={list(range(1, num_arms))}"])


def make(made: Made, stream: np.random.Generator, noise: Noise | None = None) -> Experiment:
    """An experiment in an order of its own, planned as a profile with that seed would be; ``noise`` stands for that
    of its name.
    """
    changes = {"seed": int(stream.integers(2**31)), "blocks": made.num_blocks}
    plan = plan_runs(_profile(made.num_arms).model_copy(update=changes))
    labels = [arm_label(run.variant, run.cell) for run in plan.runs]
    arms = sorted(set(labels), key=lambda label: (not label.startswith("baseline"), label))
    is_baseline = np.array([label == arms[0] for label in labels])
    logs = _logs(noise or ALL[made.noise], made, stream, is_baseline)
    where = {(label, run.block): run for label, run in zip(labels, plan.runs, strict=True)}
    values: list[Arm] = []
    positions: list[tuple[int, ...]] = []
    for arm in arms:
        own = [where[arm, block] for block in range(made.num_blocks)]
        change = 0.0 if arm == arms[0] else made.truth
        values.append(tuple({name: math.exp(change + logs[name][run.index]) for name in logs} for run in own))
        positions.append(tuple(run.position for run in own))
    return Experiment(tuple(values), tuple(positions))


def _logs(
    noise: Noise, made: Made, stream: np.random.Generator, is_baseline: NDArray[np.bool_]
) -> dict[str, NDArray[np.float64]]:
    """For each metric: what its block adds to every run of it, and the noise of the runs."""
    num_arms = len(is_baseline) // made.num_blocks
    blocks = np.repeat(stream.normal(0, BLOCK_LOG_SD, made.num_blocks), num_arms)
    names = METRICS[: made.num_metrics]
    if not made.are_metrics_alike:
        return {name: blocks + noise(stream, is_baseline, made.ratio_sd) for name in names}
    shared = blocks + noise(stream, is_baseline, made.ratio_sd)
    own_sd = OWN_SHARE * made.ratio_sd / math.sqrt(2)
    return {name: shared + stream.normal(0, own_sd, len(is_baseline)) for name in names}


def judge(experiment: Experiment, made: Made, confidence: float = CONFIDENCE) -> tuple[MetricComparison, ...]:
    """As ``compare`` judges: every metric of every cell, corrected together."""
    names = METRICS[: made.num_metrics]
    floor = MetricNoise(log_sd=made.ratio_sd, num_blocks=6, floor_frac=made.floor_frac)
    rules = Rules(
        margin_frac=made.margin_frac,
        confidence=confidence,
        is_paired=True,
        noise=dict.fromkeys(names, floor) if made.floor_frac else {},
    )
    slopes = slopes_of(experiment, names)
    blocks = tuple(range(made.num_blocks))
    (a, *others), (first, *later) = experiment.arms, experiment.positions
    compared = []
    for b, own in zip(others, later, strict=True):
        positions = tuple(np.subtract(own, first).tolist())
        for name in names:
            sides = _values(a, b, name)
            slope = None if slopes is None else slopes.get(name)
            is_adjusted = slopes is None or slope is not None
            design = BlockDesign(blocks, positions if is_adjusted else None, slope=slope)
            ratio = side_ratio(*sides, design, confidence, made.estimator)
            compared.append(compare_metric(name, "deciding", sides, rules, ratio))
    return judge_together([compared], confidence)[0]


def first_blocks(experiment: Experiment, num_blocks: int) -> Experiment:
    """The experiment as it was after so many blocks."""
    arms, positions = (
        tuple(each[:num_blocks] for each in sides) for sides in (experiment.arms, experiment.positions)
    )
    return Experiment(arms, positions)


def slopes_of(experiment: Experiment, names: Sequence[str]) -> dict[str, PooledSlope] | None:
    """The effect of the position on the logarithm of each metric, as benchctl estimates it from all arms.

    None for two arms, which estimate it with their ratio.
    """
    if len(experiment.arms) == 2:
        return None
    keys = [(block, str(arm)) for arm, blocks in enumerate(experiment.positions) for block in range(len(blocks))]
    positions = {(block, arm): experiment.positions[int(arm)][block] for block, arm in keys}
    slopes = {
        name: pooled_slope({(b, arm): experiment.arms[int(arm)][b][name] for b, arm in keys}, positions)
        for name in names
    }
    return {name: slope for name, slope in slopes.items() if slope is not None}


def judge_unpaired(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], made: Made
) -> MetricComparison:
    """As ``compare`` judges two experiments that share no plan."""
    rules = Rules(margin_frac=made.margin_frac, confidence=CONFIDENCE, is_paired=False, noise={})
    compared = []
    for name in METRICS[: made.num_metrics]:
        sides = _values(a, b, name)
        ratio = unpaired_ratio(*sides, CONFIDENCE)
        compared.append(compare_metric(name, "deciding", sides, rules, ratio))
    return judge_together([compared], CONFIDENCE)[0][0]


def _values(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], name: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(run[name] for run in a), tuple(run[name] for run in b)


def experiments(made: Made, num_experiments: int) -> Iterator[tuple[Experiment, tuple[MetricComparison, ...]]]:
    """Experiments and what is said of them; the same for the same ``made``."""
    stream = named_stream(made)
    for _ in range(num_experiments):
        experiment = make(made, stream)
        yield experiment, judge(experiment, made)


def is_found(compared: Sequence[MetricComparison]) -> bool:
    """Whether the comparison ends as a regression."""
    return any(metric.verdict == "regression" for metric in compared)


def covers(compared: MetricComparison, truth: float) -> bool:
    """Whether the printed 95 % interval holds the truth."""
    return compared.estimate is not None and holds(compared.estimate.log_interval, truth)


def holds(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and interval[0] <= value <= interval[1]
