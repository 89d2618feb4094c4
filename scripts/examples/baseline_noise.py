"""Does the cost of guidance depend on k? One baseline for each k says yes, blocks say no, on the same server.

    for k in 1 2 3 4 5; do
        benchctl simulate --profile topk-sweep --set "sweep.top_k=[$k]" --seed $k --blocks 1 -o results/single/k$k
    done
    benchctl simulate --profile topk-sweep --seed 6 --blocks 12 -o results/blocked
    python scripts/examples/baseline_noise.py results/single results/blocked

The first loop is the design of a published table: one guided run for each k, and for each a baseline of its own,
run once. The second is the same sweep in blocks. Both are read here as benchctl itself reads them.
"""

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Final

from benchctl.analysis.compare.metric import MetricComparison, Rules, compare_metric, judge_together
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.statistics.estimate import BlockDesign, RatioEstimate, estimate_paired, side_ratio
from benchctl.records.loaded import LoadedRun, load_results

METRIC: Final = "step_ms"
"""Every answer has its full length, so that step time is the cost; the simulator's is exact on any machine."""
GUIDED: Final = (2, 3, 4, 5)
"""k = 1 is greedy decoding, where guidance never acts."""
MARGIN_FRAC: Final = 0.05
PUBLISHED_S: Final = {1: (24.19, 23.19), 2: (23.22, 80.37), 3: (27.21, 81.30), 4: (22.30, 83.53), 5: (18.19, 80.50)}
"""Wall times of baseline and guided run for each k, one run each: Qwen2.5-7B with a 1.5B value model, one H100."""
BASELINE_CV: Final = 0.14
GUIDED_CV: Final = 0.018
"""Scatter of the published runs: of the five baselines, and of the four guided ones with k >= 2."""
NUM_REPETITIONS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sweep in blocks: for each k the metric and the position of its run, block by block; 0 is the baseline."""

    values: Mapping[int, tuple[float, ...]]
    positions: Mapping[int, tuple[int, ...]]


def value(run: LoadedRun) -> float:
    found = run_metrics(run)[METRIC]
    if found is None:
        raise SystemExit(f"{run.record.run_id} has no {METRIC}; is it done?")
    return found


def read_single(path: Path) -> dict[int, tuple[float, float]]:
    """By k: the one baseline and the one guided run of each directory below ``path``."""
    found = {}
    for manifest in sorted(path.glob("*/manifest.json")):
        runs = load_results(manifest.parent).runs
        baseline = next(run for run in runs if not run.record.cell)
        guided = next(run for run in runs if run.record.cell)
        found[int(str(guided.record.cell["top_k"]))] = (value(baseline), value(guided))
    return dict(sorted(found.items()))


def read_blocks(path: Path) -> Blocks:
    arms: dict[int, dict[int, LoadedRun]] = {}
    for run in load_results(path).runs:
        arms.setdefault(int(str(run.record.cell.get("top_k", 0))), {})[run.record.block] = run
    blocks = sorted(arms[0])
    return Blocks(
        values={k: tuple(value(runs[block]) for block in blocks) for k, runs in sorted(arms.items())},
        positions={k: tuple(runs[block].record.position for block in blocks) for k, runs in sorted(arms.items())},
    )


def spread(values: Sequence[float]) -> float:
    return max(values) / min(values)


def spreads_of_noise() -> list[float]:
    """Largest over smallest of four ratios that are equal but for the noise of single runs."""
    stream = random.Random("baseline noise")
    sigmas = [math.sqrt(math.log1p(cv**2)) for cv in (BASELINE_CV, GUIDED_CV)]
    return [
        spread([stream.lognormvariate(0, sigmas[1]) / stream.lognormvariate(0, sigmas[0]) for _ in GUIDED])
        for _ in range(NUM_REPETITIONS)
    ]


def slope(blocks: Mapping[int, Sequence[float]]) -> RatioEstimate:
    """What one more candidate adds to the logarithm: a straight line over k in each block, its mean over blocks."""
    centre = fmean(GUIDED)
    squares = sum((k - centre) ** 2 for k in GUIDED)
    arms = zip(*(blocks[k] for k in GUIDED), strict=True)
    return estimate_paired(
        [
            sum((k - centre) * math.log(own) for k, own in zip(GUIDED, block, strict=True)) / squares
            for block in arms
        ]
    )


def slopes_of_noise(num_blocks: int) -> float:
    """How often the interval of the slope holds 0 where no arm differs but for the noise of its runs."""
    stream = random.Random("guided noise")
    sigma = math.sqrt(math.log1p(GUIDED_CV**2))
    hits = 0
    for _ in range(NUM_REPETITIONS):
        drawn = {k: [stream.lognormvariate(0, sigma) for _ in range(num_blocks)] for k in GUIDED}
        low, high = slope(drawn).log_interval or (math.nan, math.nan)
        hits += low <= 0 <= high
    return hits / NUM_REPETITIONS


def pairwise(blocks: Blocks) -> dict[str, MetricComparison]:
    """Every guided arm against every other, judged as ``benchctl compare`` judges, all tests together."""
    rules = Rules(margin_frac=MARGIN_FRAC, confidence=0.95, is_paired=True, noise={})
    pairs = list(combinations(GUIDED, 2))
    compared = []
    for a, b in pairs:
        positions = tuple(
            later - earlier for earlier, later in zip(blocks.positions[a], blocks.positions[b], strict=True)
        )
        sides = blocks.values[a], blocks.values[b]
        ratio = side_ratio(*sides, BlockDesign(tuple(range(len(positions))), positions))
        compared.append([compare_metric(METRIC, "deciding", sides, rules, ratio)])
    judged = judge_together(compared, 0.95)
    return {f"k={b} / k={a}": metrics[0] for (a, b), metrics in zip(pairs, judged, strict=True)}


def change(estimate: RatioEstimate, confidence: float = 0.95) -> str:
    low, high = estimate.interval_at(confidence) or (math.nan, math.nan)
    return f"{math.expm1(estimate.log_ratio):+6.1%}  [{math.expm1(low):+.1%}, {math.expm1(high):+.1%}]"


def print_single(single: Mapping[int, tuple[float, float]]) -> None:
    print("One baseline for each k, one run each: ratio of guided to baseline")
    print("k   baseline ms  guided ms  ratio    published: baseline s  guided s  ratio")
    for k, (baseline, guided) in single.items():
        theirs = PUBLISHED_S[k]
        ours = f"{k}   {baseline:11.2f}  {guided:9.2f}  {guided / baseline:5.2f}"
        print(f"{ours}    {theirs[0]:21.2f}  {theirs[1]:8.2f}  {theirs[1] / theirs[0]:5.2f}")
    rows = [
        ("ratios", [b / a for a, b in map(single.get, GUIDED)], [b / a for a, b in map(PUBLISHED_S.get, GUIDED)])
    ]
    rows.append(("guided runs", [single[k][1] for k in GUIDED], [PUBLISHED_S[k][1] for k in GUIDED]))
    rows.append(("baselines", [single[k][0] for k in GUIDED], [PUBLISHED_S[k][0] for k in GUIDED]))
    print("largest / smallest over k = 2 to 5")
    for name, ours, theirs in rows:
        print(f"  {name:12} {spread(ours):.2f}    published {spread(theirs):.2f}")
    noise = spreads_of_noise()
    published = spread([b / a for a, b in map(PUBLISHED_S.get, GUIDED)])
    at_least = sum(one >= published for one in noise) / len(noise)
    print(
        f"With no dependence at all, noise of that size gives ratios that spread by {median(noise):.2f} (median),\n"
        f"and by {published:.2f} or more in {at_least:.0%} of {NUM_REPETITIONS:,} repetitions."
    )


def print_blocks(blocks: Blocks) -> None:
    print(f"\nIn {len(blocks.values[0])} blocks: every k beside every other, in the same block")
    print(f"one more candidate, k = 2 to 5: {change(slope(blocks.values))} in {METRIC}")
    print("ratio        change, 95 % interval    judged at a margin of 5 %, corrected for six")
    for label, compared in pairwise(blocks).items():
        if compared.estimate is not None:
            print(f"{label}   {change(compared.estimate):24}  {compared.verdict}")
    covered = slopes_of_noise(len(blocks.values[0]))
    print(
        f"With no dependence at all, the interval of the slope holds 0 in {covered:.0%} of {NUM_REPETITIONS:,} "
        "repetitions."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("single", type=Path, help="the directory with one result directory for each k")
    parser.add_argument("blocked", type=Path, help="the result directory of the sweep in blocks")
    asked = parser.parse_args()
    single, blocks = read_single(asked.single), read_blocks(asked.blocked)
    print_single(single)
    print_blocks(blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
