"""Is the verdict what it claims to be? Thousands of experiments of which the truth is known, in virtual time.

Orders, estimates, verdicts and corrections are those of benchctl; only the values are made (``named_noise.py``).
Shares are in per cent of the experiments, with the 95 % interval of Clopper and Pearson. Ends with exit code 1 when
a demand is refuted: when the observed share lies so far outside of it that this would happen in less than one of a
hundred repetitions if the truth lay on its edge. The same output every time.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Final

import numpy as np

from benchctl.analysis.attribution.breakdown import RunTimeBreakdown
from benchctl.analysis.attribution.decomposition import split_wall
from benchctl.analysis.attribution.estimate import WallSplit
from benchctl.analysis.compare.decide import decision_alpha, holm_levels, margins_of, verdict_of
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.metrics.table import POSITION_ADJUSTED
from benchctl.analysis.statistics.estimate import BlockDesign, estimate_paired, log_ratios, side_ratio
from benchctl.analysis.stopping_rule import ALPHA, look_blocks
from benchctl.records.record import StopMode
from benchmarks.verdict.false_alarms import false_alarms
from benchmarks.verdict.known_truth import (
    BLOCK_LOG_SD,
    CHANGES,
    CONFIDENCE,
    METRICS,
    Experiment,
    Made,
    covers,
    experiments,
    holds,
    is_found,
    judge,
    judge_unpaired,
    make,
    named_stream,
)
from benchmarks.verdict.named_noise import ALL, BAD_MACHINES, NOISES
from benchmarks.verdict.rivals import rivals
from benchmarks.verdict.sections import run_sections
from benchmarks.verdict.shares import COVERS, COVERS_AT_LEAST, MISSES, NEARLY_ALWAYS, SELDOM, Demand, Row, row

NUM_LOOKS: Final = 4
MOST_BLOCKS: Final = 20
PRECISION_FRAC: Final = 0.009
STOPS: Final[tuple[StopMode, ...]] = ("natural", "forced")


def no_change(n: int) -> Iterator[Row]:
    for noise in NOISES:
        for num_blocks in (6, 8, 12, 15, 20):
            made = Made(noise=noise, num_blocks=num_blocks)
            events = (
                {
                    "covers": covers(compared, 0.0),
                    "change called": compared.verdict in CHANGES,
                    "p < 5 %": p_of(compared) < 0.05,
                }
                for _, (compared,) in experiments(made, n)
            )
            demands = {"covers": COVERS, "change called": SELDOM, "p < 5 %": MISSES}
            yield row({"noise": noise, "blocks": num_blocks}, events, demands)


def sweep(n: int) -> Iterator[Row]:
    for noise, alike in ((name, share) for name in NOISES for share in (False, True)):
        made = Made(noise=noise, num_arms=6, num_metrics=3, are_metrics_alike=alike, margin_frac=0.0)
        events = (
            {
                "covers": covers(compared[i % len(compared)], 0.0),
                "any change called": any(metric.verdict in CHANGES for metric in compared),
            }
            for i, (_, compared) in enumerate(experiments(made, n))
        )
        condition = {"noise": noise, "blocks": 8, "metrics": "alike" if alike else "independent"}
        yield row(condition, events, {"covers": COVERS_AT_LEAST, "any change called": SELDOM})


def real_change(n: int) -> Iterator[Row]:
    for noise in NOISES:
        for num_blocks in (6, 8, 12):
            made = Made(noise=noise, num_blocks=num_blocks, change_frac=0.05)
            demands = {"regression": NEARLY_ALWAYS} if num_blocks == 8 else {}
            yield row({"noise": noise, "blocks": num_blocks}, verdicts(made, n), demands)


def inside_the_margin(n: int) -> Iterator[Row]:
    for noise in ("gaussian", "heavy tail", "random walk"):
        for num_blocks in (6, 8, 12):
            for margin in (0.02, 0.01):
                made = Made(noise=noise, num_blocks=num_blocks, change_frac=0.01, margin_frac=margin)
                demands = {"regression": SELDOM} | ({"equivalent": SELDOM} if margin == 0.01 else {})
                condition = {"noise": noise, "blocks": num_blocks, "margin": f"{margin:.0%}"}
                yield row(condition, verdicts(made, n), demands)


def equivalence(n: int) -> Iterator[Row]:
    for num_blocks in (6, 8, 12):
        for change, demands in ((0.0, {}), (0.01, {"equivalent": SELDOM}), (0.02, {"equivalent": SELDOM})):
            made = Made(num_blocks=num_blocks, ratio_sd=0.003, change_frac=change)
            yield row({"truth": f"{change:+.0%}", "blocks": num_blocks}, verdicts(made, n), demands)


def unpaired(n: int) -> Iterator[Row]:
    for noise, drift in (("gaussian", 0.0), ("heavy tail", 0.0), ("gaussian", 0.1)):
        for num_blocks in (4, 6, 8):
            made = Made(noise=noise, num_blocks=num_blocks)
            events = (
                {"covers": covers(c, 0.0), "change called": c.verdict in CHANGES}
                for c in two_days(made, n, math.log1p(drift))
            )
            demands = {"covers": COVERS_AT_LEAST, "change called": SELDOM} if not drift else {}
            between = f"{drift:+.0%}" if drift else "none"
            yield row({"noise": noise, "per side": num_blocks, "drift between days": between}, events, demands)


def two_days(made: Made, n: int, days_log: float) -> Iterator[MetricComparison]:
    """Two experiments of one arm each, which have no block in common."""
    stream = named_stream("unpaired", made, days_log)
    for _ in range(n):
        sides = [
            stream.normal(shift, BLOCK_LOG_SD, made.num_blocks)
            + ALL[made.noise](stream, np.zeros(made.num_blocks, dtype=bool), made.ratio_sd)
            for shift in (0.0, days_log)
        ]
        a, b = ([{"step_ms": math.exp(value)} for value in side] for side in sides)
        yield judge_unpaired(a, b, made)


def bad_machines(n: int) -> Iterator[Row]:
    for noise in BAD_MACHINES:
        for num_blocks in (6, 8, 12, 20):
            made = Made(noise=noise, num_blocks=num_blocks)
            events = (
                {"covers": covers(compared, 0.0), "change called": compared.verdict in CHANGES}
                for _, (compared,) in experiments(made, n)
            )
            demands = {"covers": COVERS_AT_LEAST, "change called": SELDOM}
            yield row({"noise": noise, "blocks": num_blocks}, events, demands)


ARMS_AND_BLOCKS: Final = ((2, 7), (3, 6), (3, 8), (4, 8), (5, 7), (6, 6), (6, 8), (6, 12), (9, 8), (12, 8))


def arms(n: int) -> Iterator[Row]:
    for num_arms, num_blocks in ARMS_AND_BLOCKS:
        for noise in ("gaussian", "linear drift", "outliers, 10 % by 30 %"):
            made = Made(noise=noise, num_arms=num_arms, num_blocks=num_blocks, margin_frac=0.0)
            events = (
                {
                    "covers": covers(compared[i % len(compared)], 0.0),
                    "any change called": any(metric.verdict in CHANGES for metric in compared),
                }
                for i, (_, compared) in enumerate(experiments(made, n))
            )
            condition = {"arms": num_arms, "blocks": num_blocks, "noise": noise}
            yield row(condition, events, {"covers": COVERS_AT_LEAST, "any change called": SELDOM})


POWER_GOALS: Final = (
    ("gaussian", 0.028, 0.75),
    ("noisy baseline, 3 %", 0.02, 0.50),
    ("noisy baseline, 14 %", 0.02, None),
    ("two speeds, 8 %, 0.1", 0.02, 0.50),
    ("two speeds, 10 %, 0.2", 0.02, 0.50),
    ("two speeds, 15 %, 0.3", 0.02, None),
    ("outliers, 10 % by 30 %", 0.02, 0.55),
    ("outliers, 10 % by 30 %", 0.028, 0.55),
    ("outliers, 10 % by 10 %", 0.02, 0.50),
    ("uneven", 0.02, 0.50),
    ("one clock step", 0.02, 0.50),
    ("two clock steps", 0.02, 0.50),
)
"""Noise, its scatter, and in what share of experiments of 8 blocks a true +5 % is to be found; None: no demand."""


def power(n: int) -> Iterator[Row]:
    for noise, ratio_sd, goal in POWER_GOALS:
        made = Made(noise=noise, ratio_sd=ratio_sd, change_frac=0.05, num_metrics=3, are_metrics_alike=True)
        means = replace(made, estimator="mean")
        events = (
            {
                "found": is_found(compared),
                "found by the mean": is_found(judge(experiment, means)),
                "found by the old rule": is_found_as_before(experiment, made),
                "called better": any(metric.verdict == "improvement" for metric in compared),
            }
            for experiment, compared in experiments(made, n)
        )
        demands = {"called better": SELDOM} | ({} if goal is None else {"found": Demand(low=goal)})
        yield row({"noise": noise, "scatter": f"{ratio_sd:.1%}"}, events, demands)


def is_found_as_before(experiment: Experiment, made: Made) -> bool:
    """By the rule that stood before: means, and Holm over the metrics as if they had nothing in common."""
    positions = np.subtract(experiment.positions[1], experiment.positions[0]).tolist()
    a, b = experiment.arms
    margins = margins_of(made.margin_frac)
    estimates = [
        estimate_paired(
            log_ratios([block[name] for block in a], [block[name] for block in b]),
            positions=positions,
            estimator="mean",
        )
        for name in METRICS[: made.num_metrics]
    ]
    levels = holm_levels([decision_alpha(estimate, margins) for estimate in estimates], 1 - CONFIDENCE)
    return any(
        verdict_of(estimate.interval_at(1 - level), margins, "lower") == "regression"
        for estimate, level in zip(estimates, levels, strict=True)
    )


FLOOR_LAWS: Final = (
    ("gaussian", 0.028),
    ("two speeds, 10 %, 0.2", 0.02),
    ("uneven", 0.02),
    ("outliers, 10 % by 30 %", 0.02),
    ("linear drift", 0.02),
    ("two clock steps", 0.02),
)


def floors(n: int) -> Iterator[Row]:
    """A true change outside the threshold beside noise floors of any size, also those of simulated A/As."""
    for noise, ratio_sd in FLOOR_LAWS:
        for floor_frac in (0.0, 0.02, 0.05, 0.1, 0.19, 0.3, None):
            for change_frac in (0.05, 0.1):
                made = Made(noise=noise, ratio_sd=ratio_sd, change_frac=change_frac, floor_frac=floor_frac or 0.0)
                events = (
                    {name: compared.verdict == name for name in ("regression", "equivalent", "inconclusive")}
                    for compared in beside_floors(made, n, is_measured=floor_frac is None)
                )
                floor = "of an A/A of 6" if floor_frac is None else f"{floor_frac:.0%}" if floor_frac else "none"
                condition = {"noise": noise, "floor": floor, "truth": f"{change_frac:+.0%}"}
                yield row(condition, events, {"equivalent": SELDOM})


def beside_floors(made: Made, n: int, *, is_measured: bool) -> Iterator[MetricComparison]:
    """What is said of each experiment; where ``is_measured``, with the floor of an A/A of six blocks of its own."""
    stream = named_stream("floors", made, is_measured)
    for _ in range(n):
        own = replace(made, floor_frac=floor_of_a_a(made, stream)) if is_measured else made
        yield judge(make(own, stream), own)[0]


def floor_of_a_a(made: Made, stream: np.random.Generator) -> float:
    """The noise floor that an A/A experiment of six blocks leaves on file."""
    experiment = make(replace(made, change_frac=0.0, num_blocks=6), stream)
    a, b = ([block["step_ms"] for block in arm] for arm in experiment.arms)
    positions = np.subtract(experiment.positions[1], experiment.positions[0]).tolist()
    low, high = estimate_paired(log_ratios(a, b), positions=positions).log_interval or (0.0, 0.0)
    return math.expm1(max(abs(low), abs(high)))


def stopping(n: int) -> Iterator[Row]:
    demands = {"covers": Demand(low=0.95)}
    for noise in ("gaussian", "heavy tail", "random walk"):
        made = Made(noise=noise, num_blocks=MOST_BLOCKS, ratio_sd=0.01)
        stream = named_stream("stopping", made)
        events = (stopped(make(made, stream)) for _ in range(n))
        yield row(
            {"noise": noise, "looks": "/".join(map(str, look_blocks(MOST_BLOCKS, NUM_LOOKS)))}, events, demands
        )


def stopped(experiment: Experiment) -> dict[str, bool]:
    """What the declared rule ends with, and two rules that nobody should follow."""
    a, b = (np.log([block["step_ms"] for block in arm]) for arm in experiment.arms)
    d = [float(value) for value in b - a]
    positions = np.subtract(experiment.positions[1], experiment.positions[0]).tolist()
    looks = [
        estimate_paired(d[:num], 1 - ALPHA / NUM_LOOKS, positions[:num])
        for num in look_blocks(MOST_BLOCKS, NUM_LOOKS)
    ]
    end = next((one for one in looks if math.expm1(one.half_width or 0) <= PRECISION_FRAC), looks[-1])
    return {
        "covers": holds(end.log_interval, 0.0),
        "ended early": end is not looks[-1],
        "95 % interval covers": holds(end.interval_at(0.95), 0.0),
        "measured until p < 5 %": any(not holds(one.interval_at(0.95), 0.0) for one in looks),
    }


def others(n: int) -> Iterator[Row]:
    for noise in ("gaussian", "heavy tail"):
        without, with_change = (
            row({}, rivals(Made(noise=noise, change_frac=change), n)).shares for change in (0.0, 0.05)
        )
        for name in without:
            shares = {"change called, truth 0": without[name], "change called, truth +5 %": with_change[name]}
            demands = {"change called, truth 0": SELDOM} if name.startswith("benchctl") else {}
            yield Row(condition={"noise": noise, "way of deciding": name}, shares=shares, demands=demands)


def remainder(n: int) -> Iterator[Row]:
    for stop, noise, num_blocks in product(STOPS, ("gaussian", "outliers, 10 % by 30 %"), (6, 12)):
        made = Made(noise=noise, num_blocks=num_blocks, num_metrics=3)
        stream = named_stream("remainder", stop, made)
        found = (divide(make(made, stream), stop).parts[-1] for _ in range(n))
        events = (
            {
                "covers": holds(one.estimate.log_interval, 0.0),
                "told from 1": one.is_significant,
                "one of 1 % is found": not holds(one.estimate.log_interval, -math.log1p(0.01)),
            }
            for one in found
        )
        demands = {"covers": COVERS_AT_LEAST, "told from 1": MISSES}
        demands |= {"one of 1 % is found": Demand(low=0.5)} if noise == "gaussian" else {}
        yield row({"stop": stop, "noise": noise, "blocks": num_blocks}, events, demands)


def divide(experiment: Experiment, stop: StopMode) -> WallSplit:
    """An A/A experiment divided as ``compare`` does: with natural ends steps scatter too, and the rest hardly."""
    own_share = 0.15 if stop == "forced" else 0.005
    sides = [[_run(values, stop, own_share) for values in arm] for arm in experiment.arms]
    positions = tuple(np.subtract(experiment.positions[1], experiment.positions[0]).tolist())
    blocks = tuple(range(len(positions)))
    ratios = {}
    for name, value_of in _VALUES.items():
        a, b = ([value_of(run) for run in side] for side in sides)
        design = BlockDesign(blocks, positions if name in POSITION_ADJUSTED else None)
        ratio = side_ratio(a, b, design)
        ratios |= {} if ratio is None else {name: ratio}
    return split_wall(sides[0], sides[1], stop, ratios)


_VALUES: Final[Mapping[str, Callable[[RunTimeBreakdown], float | None]]] = {
    "wall_s": lambda run: run.wall_s,
    "step_ms": lambda run: run.step_s / run.num_steps,
    "num_steps": lambda run: run.num_steps,
}


def _run(values: Mapping[str, float], stop: StopMode, own_share: float) -> RunTimeBreakdown:
    """A run of about a million steps of the time that was made; two other metrics make its steps and remainder."""
    num_steps = 10**6 if stop == "forced" else round(10**6 * values["tpot_ms"])
    step_s = num_steps * values["step_ms"]
    return RunTimeBreakdown(
        wall_s=step_s * values["wall_s"] ** own_share,
        output_tokens=10**7,
        num_steps=num_steps,
        step_s=step_s,
        num_passes=0.0,
        breakdown=None,
        floor="no floor",
    )


def verdicts(made: Made, n: int) -> Iterator[dict[str, bool]]:
    for _, (compared,) in experiments(made, n):
        yield {
            name: compared.verdict == name for name in ("regression", "improvement", "equivalent", "inconclusive")
        }


def p_of(compared: MetricComparison) -> float:
    return 1.0 if compared.estimate is None or compared.estimate.p_value is None else compared.estimate.p_value


SECTIONS: Final[Mapping[str, tuple[Callable[[int], Iterator[Row]], str]]] = {
    "no-change": (no_change, "A/A, two arms, scatter 2 %, margin 1 %"),
    "sweep": (sweep, "A/A, six arms (positions -5 to 5), 5 cells x 3 metrics = 15 corrected tests, margin 0"),
    "real-change": (real_change, "true +5 %, scatter 2 %, margin 1 %"),
    "inside": (inside_the_margin, "true +1 %, scatter 2 %: inside a margin of 2 %, and exactly on one of 1 %"),
    "equivalence": (equivalence, "scatter 0.3 %, margin 1 %, gaussian"),
    "bad-machines": (bad_machines, "A/A as above, on machines that do more than scatter"),
    "false-alarms": (false_alarms, "A/A, two arms: a change called at margin 0 and at 1 %; and a true +5 %"),
    "arms": (arms, "A/A, 2 to 12 arms, also where positions are not balanced; margin 0, scatter 2 %"),
    "power": (power, "true +5 %, 8 blocks, margin 1 %, three metrics that say nearly the same"),
    "floor": (floors, "true change outside the threshold of 1 %, beside a noise floor; 8 blocks"),
    "unpaired": (unpaired, "two experiments without common blocks, scatter 2 % and 5 % between blocks"),
    "remainder": (remainder, "A/A, wall time = steps * time per step * remainder, which holds 1"),
    "stopping": (stopping, "until a half-width of 0.9 % at one of four looks, scatter 1 %; interval of 98.75 %"),
    "others": (others, "other ways of deciding on the same 8 blocks, scatter 2 %, 1,000 requests per run"),
}


if __name__ == "__main__":
    sys.exit(run_sections(__doc__, SECTIONS, num_experiments=2000))
