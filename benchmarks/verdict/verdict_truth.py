"""Is the verdict what it claims to be? Thousands of experiments of which the truth is known, in virtual time.

Orders, estimates, verdicts and corrections are those of benchctl; only the values are made (``named_noise.py``).
Shares are in per cent of the experiments, with the 95 % interval of Clopper and Pearson. Ends with exit code 1 when
a demand is refuted: when the observed share lies so far outside of it that this would happen in less than one of a
hundred repetitions if the truth lay on its edge. The same output every time.

    python -m benchmarks.verdict.verdict_truth [--experiments N] [--sections NAME...]
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from benchctl.analysis.attribution.breakdown import RunTimeBreakdown
from benchctl.analysis.attribution.decomposition import split_wall
from benchctl.analysis.attribution.estimate import WallSplit
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.metrics.table import POSITION_ADJUSTED
from benchctl.analysis.statistics.estimate import BlockDesign, estimate_paired, log_ratios, side_ratio
from benchctl.profile.looks import look_alpha
from benchctl.profile.planning import ALPHA, look_blocks
from benchctl.records.record import StopMode
from benchmarks.common.harness import show
from benchmarks.verdict.known_truth import (
    BLOCK_LOG_SD,
    CHANGES,
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
from benchmarks.verdict.shares import COVERS, COVERS_AT_LEAST, MISSES, NEARLY_ALWAYS, SELDOM, Demand, Row, row

Case: TypeAlias = tuple[Mapping[str, object], Made, Mapping[str, Demand]]
"""A condition in words, how its experiments are made, and what is demanded of their shares."""

NUM_LOOKS: Final = 4
MOST_BLOCKS: Final = 20
PRECISION_FRAC: Final = 0.009
STOPS: Final[tuple[StopMode, ...]] = ("natural", "forced")
VERDICTS: Final = ("regression", "improvement", "equivalent", "inconclusive")
NO_CHANGE: Final = {"covers": COVERS_AT_LEAST, "change called": SELDOM}


def ends_as(verdict: str, _: int, compared: tuple[MetricComparison, ...]) -> bool:
    return compared[0].verdict == verdict


EVENTS: Final[Mapping[str, Callable[[int, tuple[MetricComparison, ...]], bool]]] = {
    "covers": lambda i, compared: covers(compared[i % len(compared)], 0.0),
    "change called": lambda _, compared: any(metric.verdict in CHANGES for metric in compared),
    "p < 5 %": lambda _, compared: p_of(compared[0]) < 0.05,
    **{name: partial(ends_as, name) for name in VERDICTS},
}
"""What may be true of the i-th experiment, of whose metrics one in turn is asked whether it covers."""


def counted(cases: Callable[[], Iterable[Case]], names: Iterable[str], n: int) -> Iterator[Row]:
    """A row for each case: in what share of its experiments these events happened."""
    for condition, made, demands in cases():
        judged = enumerate(compared for _, compared in experiments(made, n))
        yield row(condition, ({name: EVENTS[name](i, each) for name in names} for i, each in judged), demands)


def no_change() -> Iterator[Case]:
    for noise, num_blocks in product(NOISES, (6, 8, 12, 15, 20)):
        demands = {"covers": COVERS, "change called": SELDOM, "p < 5 %": MISSES}
        yield {"noise": noise, "blocks": num_blocks}, Made(noise=noise, num_blocks=num_blocks), demands


def sweep() -> Iterator[Case]:
    for noise, alike in product(NOISES, (False, True)):
        made = Made(noise=noise, num_arms=6, num_metrics=3, are_metrics_alike=alike, margin_frac=0.0)
        yield {"noise": noise, "blocks": 8, "metrics": "alike" if alike else "independent"}, made, NO_CHANGE


def real_change() -> Iterator[Case]:
    for noise, num_blocks in product(NOISES, (6, 8, 12)):
        made = Made(noise=noise, num_blocks=num_blocks, change_frac=0.05)
        demands = {"regression": NEARLY_ALWAYS} if num_blocks == 8 else {}
        yield {"noise": noise, "blocks": num_blocks}, made, demands


def inside_the_margin() -> Iterator[Case]:
    for noise, num_blocks, margin in product(("gaussian", "heavy tail", "random walk"), (6, 8, 12), (0.02, 0.01)):
        made = Made(noise=noise, num_blocks=num_blocks, change_frac=0.01, margin_frac=margin)
        demands = {"regression": SELDOM} | ({"equivalent": SELDOM} if margin == 0.01 else {})
        yield {"noise": noise, "blocks": num_blocks, "margin": f"{margin:.0%}"}, made, demands


def equivalence() -> Iterator[Case]:
    for num_blocks, change in product((6, 8, 12), (0.0, 0.01, 0.02)):
        made = Made(num_blocks=num_blocks, ratio_sd=0.003, change_frac=change)
        yield {"truth": f"{change:+.0%}", "blocks": num_blocks}, made, {"equivalent": SELDOM} if change else {}


def bad_machines() -> Iterator[Case]:
    for noise, num_blocks in product(BAD_MACHINES, (6, 8, 12, 20)):
        yield {"noise": noise, "blocks": num_blocks}, Made(noise=noise, num_blocks=num_blocks), NO_CHANGE


ARMS_AND_BLOCKS: Final = ((2, 7), (3, 6), (3, 8), (4, 8), (5, 7), (6, 6), (6, 8), (6, 12), (9, 8), (12, 8))


def arms() -> Iterator[Case]:
    for (num_arms, num_blocks), noise in product(
        ARMS_AND_BLOCKS, ("gaussian", "linear drift", "outliers, 10 % by 30 %")
    ):
        made = Made(noise=noise, num_arms=num_arms, num_blocks=num_blocks, margin_frac=0.0)
        yield {"arms": num_arms, "blocks": num_blocks, "noise": noise}, made, NO_CHANGE


SCATTER_LAWS: Final = (
    ("gaussian", 0.028),
    ("noisy baseline, 3 %", 0.02),
    ("uneven", 0.02),
    ("outliers, 10 % by 30 %", 0.02),
    ("outliers, 10 % by 10 %", 0.02),
    ("two speeds, 10 %, 0.2", 0.02),
    ("two speeds, 10 %, 0.2", 0.005),
    ("two clock steps", 0.005),
    ("clock, 5 % in half of the blocks", 0.005),
    ("clock, 8 % in three of ten blocks", 0.005),
    ("each run at one of two speeds, 8 %", 0.005),
)
"""Noise, and its scatter; where that is small, differences take few values, and some agree by chance."""


def false_alarms(n: int) -> Iterator[Row]:
    """The same A/A experiments judged without a margin and with one of 1 %, and with a true +5 %."""
    for (noise, ratio_sd), num_blocks in product(SCATTER_LAWS, (6, 8, 12)):
        made = Made(noise=noise, ratio_sd=ratio_sd, num_blocks=num_blocks, margin_frac=0.0)
        events = (alarms(experiment, made, compared) for experiment, (compared,) in experiments(made, n))
        demands = {"covers": COVERS_AT_LEAST, "margin 0": SELDOM, "margin 1 %": SELDOM}
        yield row({"noise": noise, "scatter": f"{ratio_sd:.1%}", "blocks": num_blocks}, events, demands)


def alarms(experiment: Experiment, made: Made, compared: MetricComparison) -> dict[str, bool]:
    """What is said of one experiment without a change, and of the same with one of 5 %."""
    with_margin = replace(made, margin_frac=0.01)
    a, b = experiment.arms
    changed = replace(experiment, arms=(a, tuple({name: 1.05 * block[name] for name in block} for block in b)))
    return {
        "covers": covers(compared, 0.0),
        "margin 0": compared.verdict in CHANGES,
        "margin 1 %": judge(experiment, with_margin)[0].verdict in CHANGES,
        "+5 % found": is_found(judge(changed, with_margin)),
    }


def unpaired(n: int) -> Iterator[Row]:
    for (noise, drift), num_blocks in product(
        (("gaussian", 0.0), ("heavy tail", 0.0), ("gaussian", 0.1)), (4, 6, 8)
    ):
        compared = two_days(Made(noise=noise, num_blocks=num_blocks), n, math.log1p(drift))
        events = ({"covers": covers(each, 0.0), "change called": each.verdict in CHANGES} for each in compared)
        condition = {"noise": noise, "per side": num_blocks, "drift between days": f"{drift:+.0%}"}
        yield row(condition, events, {} if drift else NO_CHANGE)


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
        events = (
            {
                "found": is_found(compared),
                "found by the mean": is_found(judge(experiment, replace(made, estimator="mean"))),
                "called better": any(metric.verdict == "improvement" for metric in compared),
            }
            for experiment, compared in experiments(made, n)
        )
        demands = {"called better": SELDOM} | ({} if goal is None else {"found": Demand(low=goal)})
        yield row({"noise": noise, "scatter": f"{ratio_sd:.1%}"}, events, demands)


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
    sizes = (0.0, 0.02, 0.05, 0.1, 0.19, 0.3, None)
    for (noise, ratio_sd), floor_frac, change_frac in product(FLOOR_LAWS, sizes, (0.05, 0.1)):
        made = Made(noise=noise, ratio_sd=ratio_sd, change_frac=change_frac, floor_frac=floor_frac or 0.0)
        compared = beside_floors(made, n, is_measured=floor_frac is None)
        events = ({name: each.verdict == name for name in VERDICTS} for each in compared)
        floor = "of an A/A of 6" if floor_frac is None else f"{floor_frac:.0%}"
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
    estimate = estimate_paired(block_logs(experiment), positions=distances(experiment))
    low, high = estimate.log_interval or (0.0, 0.0)
    return math.expm1(max(abs(low), abs(high)))


def block_logs(experiment: Experiment) -> tuple[float, ...]:
    """The logarithms of the ratios of step times, block by block."""
    a, b = ([block["step_ms"] for block in arm] for arm in experiment.arms)
    return tuple(log_ratios(a, b))


def distances(experiment: Experiment) -> tuple[int, ...]:
    """By how many runs the second arm is behind the first, block by block."""
    return tuple(np.subtract(experiment.positions[1], experiment.positions[0]).tolist())


def stopping(n: int) -> Iterator[Row]:
    looks = "/".join(map(str, look_blocks(MOST_BLOCKS, NUM_LOOKS)))
    for noise in ("gaussian", "heavy tail", "random walk"):
        made = Made(noise=noise, num_blocks=MOST_BLOCKS, ratio_sd=0.01)
        stream = named_stream("stopping", made)
        events = (stopped(make(made, stream)) for _ in range(n))
        yield row({"noise": noise, "looks": looks}, events, {"covers": Demand(low=0.95)})


def stopped(experiment: Experiment) -> dict[str, bool]:
    """What the declared rule ends with, and two rules that nobody should follow."""
    logs, positions = block_logs(experiment), distances(experiment)
    looks = [
        estimate_paired(
            logs[:num],
            1 - look_alpha(ALPHA, NUM_LOOKS, MOST_BLOCKS, is_last=num == MOST_BLOCKS),
            positions[:num],
        )
        for num in look_blocks(MOST_BLOCKS, NUM_LOOKS)
    ]
    end = next((one for one in looks if math.expm1(one.half_width or 0) <= PRECISION_FRAC), looks[-1])
    return {
        "covers": holds(end.log_interval, 0.0),
        "ended early": end is not looks[-1],
        "95 % interval covers": holds(end.interval_at(0.95), 0.0),
        "measured until p < 5 %": any(not holds(one.interval_at(0.95), 0.0) for one in looks),
    }


def remainder(n: int) -> Iterator[Row]:
    for stop, noise, num_blocks in product(STOPS, ("gaussian", "outliers, 10 % by 30 %"), (6, 12)):
        made = Made(noise=noise, num_blocks=num_blocks, num_metrics=3)
        stream = named_stream("remainder", stop, made)
        parts = (divide(make(made, stream), stop).parts[-1] for _ in range(n))
        events = (
            {
                "covers": holds(part.estimate.log_interval, 0.0),
                "told from 1": part.is_significant,
                "one of 1 % is found": not holds(part.estimate.log_interval, -math.log1p(0.01)),
            }
            for part in parts
        )
        demands = {"covers": COVERS_AT_LEAST, "told from 1": MISSES}
        demands |= {"one of 1 % is found": Demand(low=0.5)} if noise == "gaussian" else {}
        yield row({"stop": stop, "noise": noise, "blocks": num_blocks}, events, demands)


def divide(experiment: Experiment, stop: StopMode) -> WallSplit:
    """An A/A experiment divided as ``compare`` does: with natural ends steps scatter too, and the rest hardly."""
    own_share = 0.15 if stop == "forced" else 0.005
    sides = [[_run(values, stop, own_share) for values in arm] for arm in experiment.arms]
    positions = distances(experiment)
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


def p_of(compared: MetricComparison) -> float:
    return 1.0 if compared.estimate is None or compared.estimate.p_value is None else compared.estimate.p_value


def of(cases: Callable[[], Iterable[Case]], *names: str) -> Callable[[int], Iterator[Row]]:
    return partial(counted, cases, names)


SECTIONS: Final[Mapping[str, tuple[str, Callable[[int], Iterator[Row]]]]] = {
    "no-change": ("A/A, two arms, scatter 2 %, margin 1 %", of(no_change, "covers", "change called", "p < 5 %")),
    "sweep": ("A/A, six arms (positions -5 to 5), 15 corrected tests, margin 0", of(sweep, *NO_CHANGE)),
    "real-change": ("true +5 %, scatter 2 %, margin 1 %", of(real_change, *VERDICTS)),
    "inside": (
        "true +1 %, scatter 2 %: inside a margin of 2 %, and on one of 1 %",
        of(inside_the_margin, *VERDICTS),
    ),
    "equivalence": ("scatter 0.3 %, margin 1 %, gaussian", of(equivalence, *VERDICTS)),
    "bad-machines": ("A/A as above, on machines that do more than scatter", of(bad_machines, *NO_CHANGE)),
    "false-alarms": ("A/A, two arms: a change called at margin 0 and at 1 %; and a true +5 %", false_alarms),
    "arms": ("A/A, 2 to 12 arms, also where positions are not balanced; margin 0", of(arms, *NO_CHANGE)),
    "power": ("true +5 %, 8 blocks, margin 1 %, three metrics that say nearly the same", power),
    "floor": ("true change outside the threshold of 1 %, beside a noise floor; 8 blocks", floors),
    "unpaired": ("two experiments without common blocks, scatter 2 % and 5 % between blocks", unpaired),
    "remainder": ("A/A, wall time = steps * time per step * remainder, which holds 1", remainder),
    "stopping": ("until a half-width of 0.9 % at one of four looks, scatter 1 %; interval of 98.75 %", stopping),
}
"""By name: a title, and the rows for a number of experiments of each condition."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000, metavar="N", help="per condition")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    options = parser.parse_args()
    print(f"{options.experiments} experiments for each row; shares in % with their 95 % interval")
    failures = 0
    for name in options.sections:
        title, section = SECTIONS[name]
        rows = list(section(options.experiments))
        show([one.cells() for one in rows], f"{name}: {title}")
        sys.stdout.flush()
        failures += sum(len(one.failures) for one in rows)
    print(f"\n{failures} demands are refuted" if failures else "\nno demand is refuted")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
