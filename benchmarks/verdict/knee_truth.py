"""Does the interval of a knee cover the true one? Servers whose step takes a + b N, so that it is at N = a / b.

By arithmetic: the throughput of each load by that law, times the scatter of launches (one for all loads of a server
that gets a ladder of loads, one for each load with fresh servers) and of runs; latency by Little's law. Then how
often a corner, where slots end, is named. Then the simulator in virtual time: two arms with a step time of this law
in noise of the published size, a ladder of loads on each server, read as ``benchctl show`` reads it. The same
output every time. Ends with exit code 1 when a demand is refuted.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.experiment.curves import corner, vertex
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.measure.directory import Origin
from benchctl.measure.experiment import create_simulation, run_experiment
from benchctl.measure.run import Listener
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import load_profile
from benchctl.report.curve_tables import knee_lines
from benchctl.steptime.model import StepTimeModel, write_model
from benchctl.steptime.work import Coefficient
from benchctl.workload.prepare import prepare_requests
from benchmarks.common.harness import show
from benchmarks.verdict.shares import COVERS_AT_LEAST, Demand, Row, row

SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS: Final = tuple(range(8))
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Scatters are standard deviations of logarithms."""

    of_launches: float
    of_runs: float
    is_ladder: bool
    demands: Mapping[str, Demand] = field(default_factory=dict)


def conditions() -> Iterator[Condition]:
    demands = {"knee covered": COVERS_AT_LEAST}
    for of_launches, is_ladder in ((0.0, True), (0.05, True), (0.05, False)):
        for of_runs in (0.005, 0.01, 0.02, 0.04):
            yield Condition(of_launches=of_launches, of_runs=of_runs, is_ladder=is_ladder, demands=demands)


def log_powers(truth: float, condition: Condition, rng: np.random.Generator) -> list[list[float]]:
    """ln(throughput / latency) of each block at each size."""
    sizes = np.array(SIZES, dtype=float)
    powers = []
    for _ in BLOCKS:
        launch = rng.normal(0, condition.of_launches, 1 if condition.is_ladder else len(sizes))
        log_throughput = np.log(sizes / (truth + sizes)) + launch + rng.normal(0, condition.of_runs, len(sizes))
        powers.append(list(2 * log_throughput - np.log(sizes)))
    return powers


def experiment(condition: Condition, seed: int) -> dict[str, float] | str:
    """Centre and ends of the knee over the true one, or the reason why there is none."""
    rng = np.random.default_rng(seed)
    truth = 20 * 2 ** rng.uniform(-0.5, 0.5)  # anywhere between two loads
    powers = log_powers(truth, condition, rng)
    knees = [vertex(SIZES, of_block) for of_block in powers]
    logs = [math.log(knee) for knee in knees if not isinstance(knee, str)]
    if len(logs) < len(knees):
        return "no knee"
    if corner(SIZES, list(np.mean(powers, axis=0))):
        return "a corner"
    knee = estimate_paired(logs, CONFIDENCE)
    assert knee.ci_low
    assert knee.ci_high
    return {"low": knee.ci_low / truth, "high": knee.ci_high / truth, "knee": knee.ratio / truth}


def judge(condition: Condition, num_experiments: int) -> Row:
    """Shares over the experiments that have a knee, and how wide the intervals are."""
    every = [experiment(condition, seed) for seed in range(num_experiments)]
    whole = [each for each in every if not isinstance(each, str)]
    events = [{"knee covered": each["low"] <= 1 <= each["high"]} for each in whole]
    half = float(np.median([math.log(each["high"] / each["low"]) / 2 for each in whole]))
    bias = float(np.mean([math.log(each["knee"]) for each in whole]))
    named = {
        "servers": "ladder of loads" if condition.is_ladder else "fresh",
        "scatter of launches": f"{condition.of_launches:.0%}",
        "of runs": f"{condition.of_runs:.1%}",
        **{reason: f"{100 * every.count(reason) / len(every):.1f}" for reason in ("no knee", "a corner")},
        "half interval": f"{100 * half:.1f} %",
        "bias": f"{100 * bias:+.1f} %",
    }
    return row(named, events, condition.demands)


def corners() -> list[dict[str, str]]:
    """Servers whose slots end, so that the curve has a corner there, without noise: how often it is named, over
    corners between two loads, by how far beyond the corner a server with more slots has its knee; and what the
    parabola says where it is not.
    """
    rows = []
    for distance in (2, 4):
        sizes = [distance**i for i in range(1 + round(math.log(SIZES[-1], distance)))]
        for headroom in (1.0, 1.5, 2.0, 4.0, 100.0):
            ratios, num_named = [], 0
            for i in range(100):
                slots = 16 * distance ** (i / 100) / math.sqrt(distance)
                throughput = [min(size, slots) / (headroom * slots + min(size, slots)) for size in sizes]
                powers = [2 * math.log(x) - math.log(n) for x, n in zip(throughput, sizes, strict=True)]
                if corner(sizes, powers):
                    num_named += 1
                else:
                    ratios.append(float(vertex(sizes, powers)) / slots)
            else_says = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
            rows.append(
                {
                    "loads apart": f"{distance}",
                    "a / b over slots": f"{headroom:g}",
                    "named, %": f"{num_named}",
                    "else computed / true": else_says,
                }
            )
    return rows


FIXED_US: Final = 8000
SIMULATED_KNEES: Final = {"baseline": 16.0, "wide": 13.0}
"""Of the arms of the simulated experiment, in open requests."""
NEAR: Final = 0.03
"""As near to the truth as the centre of a simulated knee must be."""


def simulated(directory: Path) -> list[dict[str, str]]:
    """The knees of two simulated arms beside their truth."""
    for name, size in SIMULATED_KNEES.items():
        values = {"compute": 0.0, "memory": 0.0, "all_reduce": 0.0, "layers": 0.0}
        values |= {"requests": FIXED_US / size, "steps": FIXED_US}
        coefficients = tuple(Coefficient(name=each, value=value) for each, value in values.items())
        model = StepTimeModel(
            structure="overlap", coefficients=coefficients, hardware="h100-sxm", tensor_parallel=(1,)
        )
        write_model(directory / f"{name}.json", model)
    profile = {
        "name": "knee",
        "model": "qwen2.5-7b",
        "hardware": "h100-sxm",
        "blocks": 6,
        "per_server": "ladder",
        "engine": {"kind": "sim", "options": {"noise": "published", "cost_model": "fitted"}},
        "workload": {
            "dataset": "synthetic",
            "num_prompts": 320,
            "input_len": 16,
            "output_len": 16,
            "arrival": {"kind": "closed-loop", "max_concurrency": 8},
        },
        "sweep": {"max_concurrency": [1, 2, 4, 8, 16, 32, 64]},
        "variants": {
            name: {"server": {"step_time_model": str(directory / f"{name}.json")}} for name in SIMULATED_KNEES
        },
    }
    path = directory / "knee.yaml"
    path.write_text(json.dumps(profile), encoding="utf-8")
    loaded = load_profile(str(path))
    prepared = prepare_requests(loaded)
    results = create_simulation(loaded, prepared, Origin(output_root=directory, argv=()))
    run_experiment(results, loaded, prepared.sets, Listener(), simulate_run)
    analysis = analyze_directory(results.path)
    rows = []
    for curve, line in zip(analysis.curves, knee_lines(analysis), strict=True):
        truth, knee = SIMULATED_KNEES[curve.label], curve.knee
        is_near = not isinstance(knee, str) and abs(math.log(knee.value / truth)) < NEAR
        rows.append({"knee at": f"{truth:g}", "says": line, "": "ok" if is_near else "FAIL"})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=1000, help="of each condition")
    options = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(judge, (cases := list(conditions())), [options.experiments] * len(cases)))
    show([each.cells() for each in rows], "Knees by arithmetic, in % of experiments")
    show(corners(), "A corner at the number of slots")
    with tempfile.TemporaryDirectory() as directory:
        measured = simulated(Path(directory))
    show(measured, "Simulated servers in virtual time, 6 blocks")
    return int(any(each.failures for each in rows) or any(each[""] == "FAIL" for each in measured))


if __name__ == "__main__":
    sys.exit(main())
