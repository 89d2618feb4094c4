"""Is the verdict what it claims to be? Thousands of experiments of which the truth is known, in virtual time.

Orders, estimates, verdicts and corrections are those of benchctl; only the values are made (``named_noise.py``).
Shares are in per cent of the experiments, with the 95 % interval of Clopper and Pearson. Ends with exit code 1 when
a demand is refuted: when the observed share lies so far outside of it that this would happen in less than one of a
hundred repetitions if the truth lay on its edge. The same output every time.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
from known_truth import BLOCK_LOG_SD, Experiment, Made, experiments, judge_unpaired, make, named_stream
from named_noise import NOISES
from rivals import rivals
from shares import COVERS, COVERS_AT_LEAST, NEARLY_ALWAYS, SELDOM, Demand, Row, row
from table import show

from benchctl.analysis.metric_comparison import MetricComparison
from benchctl.analysis.statistics import estimate_paired
from benchctl.analysis.stopping_rule import ALPHA, look_blocks

CHANGES: Final = frozenset({"regression", "improvement"})
NUM_LOOKS: Final = 4
MOST_BLOCKS: Final = 20
PRECISION_FRAC: Final = 0.009


def no_change(n: int) -> Iterator[Row]:
    for noise in NOISES:
        for num_blocks in (6, 8, 12, 15, 20):
            made = Made(noise=noise, num_blocks=num_blocks)
            events = (
                {
                    "covers": covers(compared, 0.0),
                    "change called": compared.verdict in CHANGES,
                    "sign-flip p < 5 %": sign_flip(compared) < 0.05,
                }
                for _, (compared,) in experiments(made, n)
            )
            demands = {"covers": COVERS, "change called": SELDOM, "sign-flip p < 5 %": SELDOM}
            yield row({"noise": noise, "blocks": num_blocks}, events, demands)


def sweep(n: int) -> Iterator[Row]:
    for noise in NOISES:
        made = Made(noise=noise, is_sweep=True, num_metrics=3, margin_frac=0.0)
        events = (
            {
                "covers": covers(compared[i % len(compared)], 0.0),
                "any change called": any(metric.verdict in CHANGES for metric in compared),
            }
            for i, (_, compared) in enumerate(experiments(made, n))
        )
        yield row({"noise": noise, "blocks": 8}, events, {"covers": COVERS, "any change called": SELDOM})


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
            + NOISES[made.noise](stream, made.num_blocks, made.ratio_sd)
            for shift in (0.0, days_log)
        ]
        a, b = ([{"step_ms": math.exp(value)} for value in side] for side in sides)
        yield judge_unpaired(a, b, made)


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
    d, places = [float(value) for value in b - a], experiment.places[0]
    looks = [
        estimate_paired(d[:num], 1 - ALPHA / NUM_LOOKS, places[:num]) for num in look_blocks(MOST_BLOCKS, NUM_LOOKS)
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


def verdicts(made: Made, n: int) -> Iterator[dict[str, bool]]:
    for _, (compared,) in experiments(made, n):
        yield {
            name: compared.verdict == name for name in ("regression", "improvement", "equivalent", "inconclusive")
        }


def covers(compared: MetricComparison, truth: float) -> bool:
    """Whether the printed 95 % interval holds the truth."""
    return compared.estimate is not None and holds(compared.estimate.log_interval, truth)


def holds(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and interval[0] <= value <= interval[1]


def sign_flip(compared: MetricComparison) -> float:
    return 1.0 if compared.estimate is None or compared.estimate.p_value is None else compared.estimate.p_value


SECTIONS: Final[Mapping[str, tuple[Callable[[int], Iterator[Row]], str]]] = {
    "no-change": (no_change, "A/A, two arms, scatter 2 %, margin 1 %; t below 15 blocks, then BCa or t, the wider"),
    "sweep": (sweep, "A/A, six arms (places -5 to 5), 5 cells x 3 metrics = 15 corrected tests, margin 0"),
    "real-change": (real_change, "true +5 %, scatter 2 %, margin 1 %"),
    "inside": (inside_the_margin, "true +1 %, scatter 2 %: inside a margin of 2 %, and exactly on one of 1 %"),
    "equivalence": (equivalence, "scatter 0.3 %, margin 1 %, gaussian"),
    "unpaired": (unpaired, "two experiments without common blocks, scatter 2 % and 5 % between blocks"),
    "stopping": (stopping, "until a half-width of 0.9 % at one of four looks, scatter 1 %; interval of 98.75 %"),
    "others": (others, "other ways of deciding on the same 8 blocks, scatter 2 %, 1,000 requests per run"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000, metavar="N", help="per condition")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    asked = parser.parse_args()
    print(f"{asked.experiments} experiments for each row; shares in % with their 95 % interval")
    failures = 0
    for name in asked.sections:
        section, title = SECTIONS[name]
        rows = list(section(asked.experiments))
        show([one.cells() for one in rows], f"{name}: {title}")
        sys.stdout.flush()
        failures += sum(len(one.failures) for one in rows)
    print(f"\n{failures} demands are refuted" if failures else "\nno demand is refuted")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
