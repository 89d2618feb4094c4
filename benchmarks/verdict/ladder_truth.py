"""Does a ladder of loads on one server give the curve of fresh servers, and does the check say where it does not?

Each experiment is whole: eight blocks of two arms in virtual time on the engine ``sim``, with noise of the
published size (14 % between servers), four loads on each server, written to files and read as ``benchctl show``
reads them. The truth of each arm and load is the mean logarithm over lives of fresh servers that get this load
alone. B computes on another device than A, so that the ratio depends on the load. The intervals of one experiment
miss together, because its points share their servers, so one of them counts, of each load in turn. Then the test
alone, on drawn numbers whose loads scatter more than those of the simulator.

The same output every time. Ends with exit code 1 when a demand is refuted.
"""

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from benchctl.analysis.experiment.carry_over import carry_over_of
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.pairing import baseline_pairs
from benchctl.analysis.statistics.carry_over import CarryOver, LoadKey, carry_over
from benchctl.analysis.statistics.estimate import SURPRISING_P, level_interval
from benchctl.measure.capacity import metrics_of_life
from benchctl.measure.directory import Origin
from benchctl.measure.experiment import create_simulation, run_experiment
from benchctl.measure.run import Listener
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import balanced_orders, variant_settings
from benchctl.profile.settings import load_points, under_load
from benchctl.records.record import PreparedRequest
from benchctl.workload.prepare import prepare_requests
from benchmarks.common.harness import show
from benchmarks.verdict.shares import Demand, Row, row

PROFILE: Final = """\
name: ladder-truth
seed: {seed}
blocks: 8
per_server: ladder
engine: {{kind: sim, options: {{noise: published}}}}
model: qwen2.5-7b
workload:
  dataset: synthetic
  input_len: 16
  output_len: 32
  num_prompts: 64
  prompts_per_slot: 2
  arrival: {{max_concurrency: 8}}
sweep: {{max_concurrency: [1, 4, 16, 32]}}
variants:
  baseline: {{server: {{{of_both}}}}}
  b: {{server: {{hardware: a100-sxm, {of_b}}}}}
"""
METRIC: Final = "step_ms"
NUM_LIVES: Final = 100
CONDITIONS: Final[Mapping[str, tuple[str, str]]] = {
    "no carry-over": ("", ""),
    "first 60 steps 1.5 times as long": ("slow_first_steps: 60, slow_first_factor: 1.5", ""),
    "3 % after larger loads, both arms": ("aftermath: 0.03", ""),
    "3 % after larger loads, B alone": ("", "aftermath: 0.03"),
}
"""Server options of both arms, and of B alone."""
COVERED: Final = Demand(low=0.93)
ALARMED: Final = Demand(low=0.95)
SILENT: Final = Demand(high=0.05)
DEMANDS: Final[Mapping[str, Mapping[str, Demand]]] = {
    "no carry-over": {
        "ratio covered": COVERED,
        "level covered": COVERED,
        "values alarm": SILENT,
        "ratio alarms": SILENT,
    },
    "first 60 steps 1.5 times as long": {"first is named": ALARMED},
    "3 % after larger loads, both arms": {
        "values alarm": ALARMED,
        "ratio covered": COVERED,
        "ratio alarms": SILENT,
    },
    "3 % after larger loads, B alone": {"ratio alarms": Demand(low=0.9)},
}


def profile_of(condition: str, seed: int) -> Profile:
    of_both, of_b = CONDITIONS[condition]
    of_b = ", ".join(filter(None, (of_both, of_b)))
    return parse_profile(PROFILE.format(seed=seed, of_both=of_both, of_b=of_b), condition)


@cache
def requests_of(condition: str, point: int) -> tuple[PreparedRequest, ...]:
    """The requests of one load point, the same in every experiment: lengths are fixed, and texts cost nothing."""
    profile = profile_of(condition, 0)
    return prepare_requests(profile).sets.of(load_points(profile)[point])


def true_logs(condition: str, variant: str, point: int, num_lives: int) -> float:
    """The mean logarithm of the metric over fresh servers that get this load alone."""
    profile = profile_of(condition, 0)
    cell = load_points(profile)[point]
    settings = variant_settings(profile, variant, {})
    lives = (
        metrics_of_life(under_load(profile, cell), settings, requests_of(condition, point), 1_000_000 + seed)
        for seed in range(num_lives)  # those of both arms alike, which takes their noise out of the ratio
    )
    return fmean(math.log(metrics[METRIC] or math.nan) for metrics in lives)


def alarm(effects: Mapping[str, CarryOver], name: str) -> str | None:
    """The term that a warning names; None where there is none."""
    effect = effects.get(name)
    return effect.clearest if effect and effect.p_value < SURPRISING_P else None


def events(condition: str, seed: int, truth: Mapping[tuple[str, int], float]) -> dict[str, bool]:
    """Of one experiment: its alarms, and whether intervals hold the truth, of one point and arm in turn."""
    profile = profile_of(condition, seed)
    prepared = prepare_requests(profile)
    with tempfile.TemporaryDirectory() as folder:
        results = create_simulation(profile, prepared, Origin(output_root=Path(folder), argv=()))
        run_experiment(results, profile, prepared.sets, Listener(), simulate_run)
        experiment = load_experiment(results.path)
        effects = carry_over_of(experiment)
        points = load_points(profile)
        point = seed % len(points)
        pair = next(pair for pair in baseline_pairs(experiment) if pair.b.cell == points[point])
        ratio = pair.ratio(METRIC)
    assert ratio is not None
    interval = ratio.estimate.log_interval
    variant, values, centre = (
        ("baseline", ratio.a_values, ratio.a)
        if seed // len(points) % 2
        else ("b", ratio.b_values, ratio.a * ratio.estimate.ratio)
    )
    level = level_interval(values, centre)
    assert interval is not None
    assert level is not None
    true_ratio = truth["b", point] - truth["baseline", point]
    return {
        "ratio covered": interval[0] <= true_ratio <= interval[1],
        "level covered": level[0] <= math.exp(truth[variant, point]) <= level[1],
        "values alarm": alarm(effects, METRIC) is not None,
        "first is named": alarm(effects, METRIC) == "first",
        "ratio alarms": alarm(effects, f"ratio of {METRIC}") is not None,
    }


def drawn(seed: int, scatter: float, num_loads: int, num_blocks: int, term: str, size: float) -> dict[str, bool]:
    """The test alone on two metrics of two arms, whose loads scatter and whose servers scatter by 14 %."""
    rng, sizes = np.random.default_rng(seed), [(4.0**i,) for i in range(num_loads)]
    rows = balanced_orders(num_loads, num_blocks, random.Random(f"{seed}:ladder:0"))
    orders = {block: [sizes[i] for i in order] for block, order in enumerate(rows)}
    tables: dict[str, dict[LoadKey, float]] = {"one": {}, "other": {}}
    for block, order in orders.items():
        for server in "ab":
            level = float(rng.normal(0, 0.14))
            for position, load in enumerate(order):
                is_larger = position > 0 and order[position - 1] > load
                effect = (
                    size
                    * {"none": 0, "per_load": position, "after_larger": is_larger, "first": position == 0}[term]
                )
                common = rng.normal(0, scatter)
                for table in tables.values():
                    own = rng.normal(0, scatter)
                    table[block, server, load] = level + effect + float(0.7 * common + 0.7 * own)
    effects = carry_over(tables, orders)
    named = {alarm(effects, name) for name in tables} - {None}
    return {"alarm": bool(named), "term is named": term in named}


def truth_of(condition: str, num_lives: int, pool: ProcessPoolExecutor) -> dict[tuple[str, int], float]:
    """The truth by arm and load."""
    keys = [(variant, point) for variant in ("baseline", "b") for point in range(4)]
    logs = pool.map(true_logs, *zip(*((condition, *key, num_lives) for key in keys), strict=True))
    return dict(zip(keys, logs, strict=True))


def judge(
    condition: str, num_experiments: int, truth: Mapping[tuple[str, int], float], pool: ProcessPoolExecutor
) -> Row:
    """All experiments of a condition."""
    futures = [pool.submit(events, condition, seed, truth) for seed in range(num_experiments)]
    happened = [future.result() for future in futures]
    return row({"condition": condition}, happened, DEMANDS.get(condition))


def judge_drawn(scatter: float, loads: int, blocks: int, term: str, size: float, pool: ProcessPoolExecutor) -> Row:
    """All drawn experiments of a condition; of those without carry-over one in a hundred may raise an alarm."""
    number = 500 if term == "none" else 100
    futures = [pool.submit(drawn, seed, scatter, loads, blocks, term, size) for seed in range(number)]
    condition = {"loads": loads, "blocks": blocks, "scatter": f"{scatter:.1%}", "planted": f"{term} {size:.0%}"}
    demands = {"alarm": Demand(high=0.01)} if term == "none" else {}
    return row(condition, [future.result() for future in futures], demands)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=50)
    parser.add_argument("--lives", type=int, default=NUM_LIVES)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        measured, lone = [], truth_of("no carry-over", options.lives, pool)
        for condition, (of_both, _) in CONDITIONS.items():
            # nothing comes before the load of a fresh server, but its first steps are slow
            truth = truth_of(condition, options.lives, pool) if "slow_first" in of_both else lone
            measured.append(judge(condition, options.experiments, truth, pool))
            print(" | ".join(measured[-1].cells().values()), file=sys.stderr, flush=True)
        designs = [(0.01, loads, blocks, "none", 0.0) for loads, blocks in ((3, 6), (3, 8), (5, 8), (5, 16))]
        designs += [
            (scatter, 5, 8, term, size)
            for term, size in (("first", 0.03), ("after_larger", 0.03), ("per_load", 0.01))
            for scatter in (0.005, 0.01, 0.02)
        ]
        tests = []
        for design in designs:
            tests.append(judge_drawn(*design, pool))
            print(" | ".join(tests[-1].cells().values()), file=sys.stderr, flush=True)
    show([each.cells() for each in measured], f"{options.experiments} experiments each, per cent")
    show([each.cells() for each in tests], "The test alone, per cent")
    return int(any(each.failures for each in (*measured, *tests)))


if __name__ == "__main__":
    sys.exit(main())
