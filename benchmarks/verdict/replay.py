"""Designs of an experiment, replayed on the recorded loads of one: blocks are drawn anew, and each design takes of
them what it would have measured, and is charged what that took.

A replay knows no more than the recorded blocks. Drawn with replacement, they show a little less scatter than new
ones would (by sqrt(1 - 1 / blocks)), and no drift from block to block; both hold for all designs alike. A design of
N loads gets N of those of each server, drawn without replacement. What chance left of a ratio in the recording is
removed before (``recentred``), and half of the drawn blocks have their arms swapped, which then are alike: so every
estimator has the planted ratio as its truth, however few blocks there are.
Estimates, verdicts, levels of looks, and the choice of ``loads_per_server: auto`` are those of benchctl.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Final, Literal

import numpy as np

from benchctl.analysis.compare.decide import chance_of_verdict
from benchctl.analysis.compare.looks import FUTILE_BELOW
from benchctl.analysis.compare.metric import MetricComparison, Rules, compare_metric, judge_together
from benchctl.analysis.compare.result import OverallVerdict, first_verdict
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.statistics.components import Costs, Evidence, loads_for_least_cost, variance_components
from benchctl.analysis.statistics.estimate import BlockDesign, Estimator, RunKey, side_ratio
from benchctl.profile.bounds import PILOT_LOADS
from benchctl.profile.looks import look_alpha
from benchctl.profile.planning import ALPHA, PILOT_BLOCKS, look_blocks
from benchctl.records.loaded import LoadedRun
from benchctl.units import count_of
from benchmarks.common.harness import Figures

WITHIN: Final = "80 % have it after"
FIXED_BLOCKS: Final = (6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 50, 60, 80, 100, 150)
VERDICTS: Final[Mapping[str, OverallVerdict]] = {
    "regression": "regression",
    "improvement": "improvement",
    "equivalent": "equivalent",
}


@dataclass(frozen=True, slots=True)
class Server:
    """A run: its position in the block, the seconds of all but its loads, and each load with its metrics.

    ``later_waves_s``, which are among the former, are those of the warm-up after its first wave.
    """

    position: int
    other_s: float
    loads_s: tuple[float, ...]
    metrics: tuple[Mapping[str, float | None], ...]
    later_waves_s: float = 0.0

    def logs(self, metric: str, num_loads: int | None = None) -> dict[int, float]:
        """The logarithms of the first loads that have the metric, by the number of the load."""
        values = {number: of_load[metric] for number, of_load in enumerate(self.metrics[:num_loads], 1)}
        return {number: math.log(value) for number, value in values.items() if value}

    def value(self, metric: str, num_loads: int) -> float | None:
        """exp of the mean of the logarithms of its first loads."""
        logs = self.logs(metric, num_loads)
        return math.exp(fmean(logs.values())) if logs else None


Block = tuple[Server, Server]


def recorded_blocks(experiment: Experiment, variant: str, metrics: Sequence[str]) -> list[Block]:
    """The blocks in which the baseline and the arm of ``variant`` count, the baseline first."""
    runs = [run for run in experiment.results.runs if run.record.state == "done"]
    ends = run_ends(runs)
    by_arm = {arm.variant: arm.runs for arm in experiment.arms}
    baseline, changed = by_arm[experiment.results.manifest.baseline], by_arm[variant]
    return [
        (
            server_of(experiment, baseline[block], metrics, ends),
            server_of(experiment, changed[block], metrics, ends),
        )
        for block in sorted(baseline.keys() & changed.keys())
    ]


def run_ends(runs: Sequence[LoadedRun]) -> dict[str, int]:
    """The launch of the next run, which is the end of this one; of the last, its stop and the usual pause."""
    records = sorted((run.record for run in runs), key=lambda record: record.times.launch_ns or 0)
    after = [(later.times.launch_ns or 0) - (record.times.stop_ns or 0) for record, later in pairwise(records)]
    usual = int(median(after))
    # The pause before a measurement was resumed is nobody's.
    pauses = [usual if not 0 <= each <= 10 * usual else each for each in (*after, usual)]
    return {
        record.run_id: (record.times.stop_ns or 0) + pause for record, pause in zip(records, pauses, strict=True)
    }


def server_of(experiment: Experiment, run: LoadedRun, metrics: Sequence[str], ends: Mapping[str, int]) -> Server:
    """What a run took until its end, load by load with the pauses between them, and the metrics of each load."""
    times, end_ns = run.record.times, ends[run.record.run_id]
    warmup = getattr(run.record, "warmup", None)  # records of before have none
    waves, warmup_ns = len(warmup.waves) if warmup else 1, (times.first_send_ns or 0) - (times.warmup_start_ns or 0)
    sent = [load.record.times for load in run.loads]
    firsts, lasts = [each.first_send_ns or 0 for each in sent], [each.last_token_ns or 0 for each in sent]
    loads_ns = [last - before for before, last in zip((firsts[0], *lasts), lasts, strict=False)]
    return Server(
        position=run.record.position,
        other_s=(end_ns - (times.launch_ns or 0) - sum(loads_ns)) / 1e9,
        loads_s=tuple(ns / 1e9 for ns in loads_ns),
        metrics=tuple({name: each[name] for name in metrics} for each in experiment.load_metrics(run)),
        later_waves_s=warmup_ns / 1e9 * (1 - 1 / max(waves, 1)),
    )


def seconds_of(blocks: Sequence[Block], num_loads: Sequence[int], *, has_one_wave: bool = False) -> float:
    """Machine time of these blocks, each with its number of loads per server; with one wave of warm-up or all."""
    return sum(
        server.other_s + sum(server.loads_s[:n]) - (server.later_waves_s if has_one_wave else 0.0)
        for block, n in zip(blocks, num_loads, strict=True)
        for server in block
    )


def drawn(question: "Question", count: int, stream: np.random.Generator) -> list[Block]:
    """``count`` blocks with replacement, the loads of each server in a new order, the second arm at its true ratio.

    In each two the arms begin once each, as in a plan; a block of the other order has its arms swapped.
    """
    chosen: list[Block] = []
    ratios = dict.fromkeys(question.metrics, math.exp(question.true_log_ratio))
    while len(chosen) < count:
        for is_first in stream.permutation([True, False]).tolist():
            a, b = question.blocks[int(stream.integers(len(question.blocks)))]
            if (a.position < b.position) != is_first:
                a, b = b, a
            chosen.append((_in_new_order(a, stream), _scaled(_in_new_order(b, stream), ratios)))
    return chosen[:count]


def _in_new_order(server: Server, stream: np.random.Generator) -> Server:
    order = stream.permutation(len(server.loads_s)).tolist()
    loads_s, metrics = (tuple(each[i] for i in order) for each in (server.loads_s, server.metrics))
    return replace(server, loads_s=loads_s, metrics=metrics)


def judged(
    blocks: Sequence[Block],
    num_loads: Sequence[int],
    metrics: Sequence[str],
    rules: Rules,
    estimator: Estimator,
) -> tuple[MetricComparison, ...]:
    """As ``compare`` judges these blocks, each with its number of loads per server."""
    positions = tuple(b.position - a.position for a, b in blocks)
    design = BlockDesign(tuple(range(len(blocks))), positions)
    compared = []
    for name in metrics:
        a, b = (
            tuple(block[side].value(name, n) for block, n in zip(blocks, num_loads, strict=True)) for side in (0, 1)
        )
        ratio = side_ratio(a, b, design, rules.confidence, estimator)
        compared.append(compare_metric(name, "deciding", (a, b), rules, ratio))
    return judge_together([[each for each in compared if each is not None]], rules.confidence)[0]


def logs_by_server(
    blocks: Sequence[Block], metric: str, num_loads: int | None = None
) -> dict[RunKey, dict[int, float]]:
    """The logarithms of a metric by block and arm, and by load."""
    return {
        (index, arm): server.logs(metric, num_loads)
        for index, block in enumerate(blocks)
        for arm, server in zip(("baseline", "changed"), block, strict=True)
    }


def recentred(question: "Question") -> "Question":
    """The question with every metric of the changed arm multiplied so that its estimated ratio is 1."""
    loads = [question.most_loads] * len(question.blocks)
    compared = judged(question.blocks, loads, question.metrics, question.rules(0.95), question.estimator)
    factors = {each.metric.name: math.exp(-each.estimate.log_ratio) for each in compared if each.estimate}
    return replace(question, blocks=[(a, _scaled(b, factors)) for a, b in question.blocks])


def _scaled(server: Server, factors: Mapping[str, float]) -> Server:
    metrics = tuple(
        {name: None if value is None else value * factors.get(name, 1.0) for name, value in each.items()}
        for each in server.metrics
    )
    return replace(server, metrics=metrics)


def pilot_evidence(blocks: Sequence[Block], metrics: Sequence[str], num_loads: int) -> Iterator[Evidence]:
    """What these blocks say of the scatter of each metric."""
    for name in metrics:
        servers = logs_by_server(blocks, name, num_loads)
        if (components := variance_components(servers)) is not None:
            yield components.evidence


def auto_loads(blocks: Sequence[Block], metrics: Sequence[str], most_blocks: int, most_loads: int) -> int:
    """The number that ``loads_per_server: auto`` takes after the pilot, of those that are on record."""
    costs = Costs(
        sum(server.other_s for block in blocks for server in block) / len(blocks),
        sum(fmean(server.loads_s[:PILOT_LOADS]) for block in blocks for server in block) / len(blocks),
    )
    evidence = list(pilot_evidence(blocks, metrics, PILOT_LOADS))
    return min(loads_for_least_cost(evidence, costs, len(blocks), most_blocks), most_loads)


Levels = Callable[[int, int], Sequence[tuple[int, float]]]
"""The looks of an experiment of so many blocks at most, with so many looks: blocks until then, and confidence."""


def divided_levels(most_blocks: int, num_looks: int) -> list[tuple[int, float]]:
    """Bonferroni: alpha divided by the looks, as benchctl did before it had group-sequential ones."""
    return [(blocks, 1 - ALPHA / num_looks) for blocks in look_blocks(most_blocks, num_looks)]


def sequential_levels(most_blocks: int, num_looks: int) -> list[tuple[int, float]]:
    """Group-sequential levels, as benchctl has them."""
    looks = look_blocks(most_blocks, num_looks)
    return [
        (blocks, 1 - look_alpha(ALPHA, len(looks), most_blocks, is_last=blocks == most_blocks)) for blocks in looks
    ]


@dataclass(frozen=True, slots=True)
class Design:
    """A number of loads per server, and when to end: at the last look, when precise, or when there is a verdict."""

    name: str
    num_loads: int | Literal["auto"]
    until: Literal["end", "precision", "verdict"]
    levels: Levels
    num_looks: int = 4
    precision_frac: float = 0.0
    has_one_wave: bool = False
    """Whether it is charged the first wave of the warm-up alone, as before warm-ups went on until they agree."""


@dataclass(frozen=True, slots=True)
class Question:
    """Recorded blocks, the metrics and rules by which they are judged, and the truth with the right answer."""

    blocks: Sequence[Block]
    metrics: Sequence[str]
    estimator: Estimator
    margin_frac: float
    true_log_ratio: float
    right: str

    def rules(self, confidence: float) -> Rules:
        return Rules(margin_frac=self.margin_frac, confidence=confidence, is_paired=True, noise={})

    @property
    def most_loads(self) -> int:
        """The most on one server; one that lost a load has fewer."""
        return max(len(server.loads_s) for block in self.blocks for server in block)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one replayed experiment ended."""

    verdict: str
    seconds: float
    num_blocks: int
    num_loads: int


def replay(question: Question, design: Design, most_blocks: int, stream: np.random.Generator) -> Outcome:
    """One experiment of ``most_blocks`` blocks at most."""
    blocks = drawn(question, most_blocks, stream)
    num_loads = [PILOT_LOADS if design.num_loads == "auto" else design.num_loads] * PILOT_BLOCKS
    chosen = num_loads[0]
    if design.num_loads == "auto":
        chosen = auto_loads(blocks[:PILOT_BLOCKS], question.metrics, most_blocks, question.most_loads)
    num_loads += [chosen] * (most_blocks - PILOT_BLOCKS)
    looks = design.levels(most_blocks, design.num_looks)
    for number, confidence in looks:
        so_far, loads = blocks[:number], num_loads[:number]
        compared = judged(so_far, loads, question.metrics, question.rules(confidence), question.estimator)
        if number == most_blocks or is_over(design, compared, most_blocks, looks[-1][1]):
            break
    seconds = seconds_of(so_far, loads, has_one_wave=design.has_one_wave)
    return Outcome(overall(compared), seconds, number, chosen)


def is_over(design: Design, compared: Sequence[MetricComparison], most_blocks: int, last_confidence: float) -> bool:
    """Whether a look ends the experiment: all is precise, or has its verdict, or is unlikely to get one."""
    if design.until == "verdict":
        chances = [
            chance_of_verdict(
                each.estimate,
                each.margins,
                most_blocks,
                # The correction for several metrics is taken to stay as it is.
                1 - (1 - (each.judged_confidence or 0.0)) * (1 - last_confidence) / (1 - each.rules.confidence),
            )
            for each in compared
            if each.verdict not in VERDICTS and each.estimate is not None
        ]
        return all(chance < FUTILE_BELOW for chance in chances)
    widths = [metric.estimate.half_width for metric in compared if metric.estimate is not None]
    return design.until == "precision" and all(
        width is not None and math.expm1(width) <= design.precision_frac for width in widths
    )


def overall(compared: Sequence[MetricComparison]) -> str:
    """The verdict of all metrics together, as a comparison with one cell has it."""
    return first_verdict(VERDICTS.get(metric.verdict, "inconclusive") for metric in compared)


def summary(question: Question, design: Design, outcomes: Sequence[Outcome]) -> Figures:
    """Minutes to the right verdict: of all experiments on average, and within which 80 % of them had it."""
    times = sorted(each.seconds / 60 if each.verdict == question.right else math.inf for each in outcomes)
    within = times[math.ceil(0.8 * len(times)) - 1]
    return {
        "design": design.name,
        "loads": median(each.num_loads for each in outcomes),
        "blocks": fmean(each.num_blocks for each in outcomes),
        "right, %": 100 * fmean(each.verdict == question.right for each in outcomes),
        "wrong, %": 100 * fmean(each.verdict not in {question.right, "inconclusive"} for each in outcomes),
        "minutes, mean": fmean(each.seconds for each in outcomes) / 60,
        WITHIN: None if math.isinf(within) else within,
    }


def least_fixed(question: Question, num_loads: int, replays: int, stream: np.random.Generator) -> Figures:
    """The fewest blocks, fixed in advance, after which 80 % have the right verdict, and the minutes they take.

    The most that are tried where no number suffices.
    """
    rows: dict[int, Figures] = {}

    def is_enough(number: int) -> bool:
        design = Design(
            f"{count_of(num_loads, 'load')}, {number} blocks",
            num_loads,
            "end",
            divided_levels,
            1,
            has_one_wave=True,
        )
        outcomes = [replay(question, design, number, stream) for _ in range(replays)]
        rows[number] = summary(question, design, outcomes)
        return rows[number][WITHIN] is not None

    least = bisect_left(FIXED_BLOCKS, True, key=is_enough)
    return rows[FIXED_BLOCKS[min(least, len(FIXED_BLOCKS) - 1)]]
