"""Capacities whose truth is known: what eight blocks find of a planted difference, and what searches on one server
cover.

The server is simulated without noise, its requests drawn anew for each experiment. A server that is slower by a
factor f has all times of a closed loop times f, so ln(latency / limit) at every size is that of the simulation plus
ln f: one simulation of a set and a size serves every block, arm and scatter, exactly. Estimates and verdicts are
benchctl's own.

True is the capacity *of the law*, by loads of 100,000 requests, and that *of these requests*, by brute force: the
experiment's own set at every whole size around it. The rules of searches on one server are written anew from their
descriptions:

* doubling and bisection with Wilson's interval of the attained share (GuideLLM, pull request 1086);
* isotonic regression with a monotone cubic, its root sent again ten times on the same server, and a bootstrap of
  the margin there (AIPerf, pull request 912).

    python -m benchmarks.verdict.capacity_truth [--experiments 50] [--jobs 2]
"""

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq, isotonic_regression
from scipy.stats import binomtest

from benchctl.analysis.compare.metric import Rules, compare_metric, judge_together
from benchctl.analysis.statistics.estimate import BlockDesign, level_interval, side_ratio
from benchctl.analysis.statistics.isotone import crossing
from benchctl.records.record import PreparedRequest
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.requests import CountedRequests
from benchctl.sim.simulation import simulate
from benchctl.workload.opening import running_requests
from benchmarks.verdict.shares import NEARLY_ALWAYS, SELDOM, Demand, Share

Floats: TypeAlias = NDArray[np.float64]
METRIC: Final = "capacity_concurrency"
BLOCKS: Final = 8
CENTRE: Final = 48
"""Requests at once around which the limits put the capacity."""
LOAD_SD: Final = 0.01
"""Scatter of the loads of one server."""
PLANTED: Final = 0.05
FACTORS: Final = (0.5, 0.71, 0.84, 0.92, 1.0, 1.09, 1.19, 1.41, 2.0)
PILOT: Final = (4, 8, 16, 32, 64, 128, 256)
LAUNCH_SDS: Final = (0.0, 0.01, 0.02, 0.05)
_CONFIG: Final = SimConfig(cost_model="roofline", hardware="made:60:2000")
"""A device whose decode is bound by compute from some 20 sequences on, so that latency rises with the load."""
_WORD_TOKENS: Final = 2


class Objective(NamedTuple):
    """Limits in ms, and the share of requests that keep all of them."""

    name: str
    limits_ms: tuple[tuple[str, float], ...]
    share: float


OBJECTIVES: Final = (
    Objective("tpot 43 ms, 95 %", (("tpot", 43.0),), 0.95),
    Objective("tpot 43 ms and ttft 170 ms, 90 %", (("tpot", 43.0), ("ttft", 170.0)), 0.90),
)


def _log_normal(stream: random.Random, mean: float, cv: float) -> int:
    sigma = math.sqrt(math.log(1 + cv**2))
    return max(1, round(stream.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def _drawn(num_requests: int, name: str) -> list[PreparedRequest]:
    stream = random.Random(name)
    return [
        PreparedRequest(
            request_id=str(i), index=i, arrival_ns=0, prompt="", prompt_tokens=_log_normal(stream, 256, 0.5),
            max_tokens=_log_normal(stream, 96, 0.3), seed=0, source="",
        )
        for i in range(num_requests)
    ]  # fmt: skip


def ratios_to_limits(requests: Sequence[PreparedRequest], slots: int, objective: Objective) -> Floats:
    """The largest latency over limit of each request of a closed loop that begins running, in ascending order."""
    opening = running_requests(requests, slots)
    sent = CountedRequests(
        [each.prompt_tokens + _WORD_TOKENS for each in opening] + [each.prompt_tokens for each in requests],
        [each.max_tokens for each in (*opening, *requests)],
    )
    ended = simulate(_CONFIG, [SimLoad(requests=sent, max_concurrency=slots)], keeps_steps=False).requests
    counted = ended.index >= len(opening)
    gaps = np.maximum(1, ended.output_tokens - 1)
    latencies_ms = {
        "ttft": (ended.first_token_ns - ended.arrival_ns) / 1e6,
        "tpot": (ended.last_token_ns - ended.first_token_ns) / gaps / 1e6,
    }
    each = [latencies_ms[name][counted] / limit for name, limit in objective.limits_ms]
    return np.sort(np.max(each, axis=0))


def log_quantile(ordered: Floats, share: float) -> float:
    """ln of the ratio that ``share`` of the requests keep: at most 0 where the objective holds."""
    return math.log(ordered[math.ceil(share * len(ordered)) - 1])


@dataclass(frozen=True, slots=True)
class RequestSet:
    """Requests of one experiment, and their ratios at each size without noise, simulated once."""

    requests: Sequence[PreparedRequest]
    objective: Objective
    _ratios: dict[int, Floats] = field(default_factory=dict)

    def ratios(self, size: int) -> Floats:
        if size not in self._ratios:
            self._ratios[size] = ratios_to_limits(self.requests, size, self.objective)
        return self._ratios[size]

    def log_ratio(self, size: int) -> float:
        return log_quantile(self.ratios(size), self.objective.share)

    def log_ratios(self, sizes: Sequence[int]) -> Floats:
        return np.array([self.log_ratio(size) for size in sizes])


class Truth(NamedTuple):
    """Of the law: the capacity, the elasticity there, and the speed that makes it larger by what is planted."""

    size: float
    elasticity: float
    log_speed: float


def truth_of_law(objective: Objective, num_requests: int) -> Truth:
    requests = RequestSet(_drawn(num_requests, "law"), objective)
    sizes = range(CENTRE - 10, CENTRE + 13, 2)
    logs = requests.log_ratios(sizes)
    fitted = crossing(sizes, logs)
    assert fitted.size is not None
    x = np.log(list(sizes))
    log_speed = float(np.interp(math.log(fitted.size * (1 + PLANTED)), x, logs))
    return Truth(fitted.size, fitted.elasticity or math.nan, log_speed)


def grid_of(requests: RequestSet, log_speed: float, log_factors: Sequence[float]) -> tuple[int, ...]:
    """The sizes of an experiment, from a pilot of one server of each arm with steps of 2."""
    logs = requests.log_ratios(PILOT)
    arms = [crossing(PILOT, logs + f).size for f in (log_factors[0], log_factors[1] - log_speed)]
    centre = math.exp(sum(math.log(size or CENTRE) for size in arms) / 2)
    return tuple(dict.fromkeys(round(factor * centre) for factor in FACTORS))


class Ended(NamedTuple):
    """One experiment at one launch scatter."""

    verdict: str
    level: float
    covers_ratio: bool
    half_width: float


def capacities(
    requests: RequestSet, sizes: Sequence[int], stream: np.random.Generator, launch_sd: float, log_speed: float
) -> list[float | None]:
    """The capacity of one arm in each block: a launch for each, and a load of its own for each size."""
    logs, of_blocks = requests.log_ratios(sizes) - log_speed, []
    for _ in range(BLOCKS):
        log_factor = launch_sd * stream.standard_normal()
        of_loads = LOAD_SD * stream.standard_normal(len(sizes))
        of_blocks.append(crossing(sizes, logs + log_factor + of_loads).size)
    return of_blocks


def measured(requests: RequestSet, launch_sd: float, log_speed: float, change: float, name: str) -> Ended:
    """One experiment of two arms, judged as ``benchctl compare`` judges it."""
    stream = np.random.default_rng(list(name.encode()))
    sizes = grid_of(requests, log_speed, [launch_sd * each for each in stream.standard_normal(2)])
    a, b = (tuple(capacities(requests, sizes, stream, launch_sd, speed)) for speed in (0.0, log_speed))
    design = BlockDesign(tuple(range(BLOCKS)), tuple((1, -1) * (BLOCKS // 2)), (-0.5, 0.5) * (BLOCKS // 2))
    ratio = side_ratio(a, b, design)
    rules = Rules(margin_frac=0.01, confidence=0.95, is_paired=True, noise={})
    unreliable = "censored" if None in (*a, *b) else None
    metric = compare_metric(METRIC, "deciding", (a, b), rules, ratio, unreliable=unreliable)
    assert metric is not None
    judged = judge_together([[metric]], 0.95)[0][0]
    if ratio is None or ratio.estimate.log_interval is None:
        return Ended(judged.verdict, math.nan, False, math.nan)
    low, high = ratio.estimate.log_interval
    return Ended(judged.verdict, ratio.a, low <= math.log1p(change) <= high, (high - low) / 2)


Bounds: TypeAlias = tuple[float, float]


def bisected(requests: RequestSet, log_factor: float, stream: np.random.Generator) -> tuple[Bounds, Bounds]:
    """Doubling from one, then bisection to neighbours; a probe passes if the attained share is the target.

    Returns [last that passes, first that fails], and [largest pass, smallest failure] whose Wilson intervals are
    wholly on one side of the target.
    """
    share, probes = requests.objective.share, dict[int, int]()

    def passes(size: int) -> bool:
        factor = math.exp(log_factor + LOAD_SD * stream.standard_normal())
        probes[size] = int(np.searchsorted(requests.ratios(size) * factor, 1.0, side="right"))
        return probes[size] >= share * len(requests.requests)

    low, high = 0, 1
    while passes(high) and high < 1024:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    wilson = {
        size: binomtest(good, len(requests.requests)).proportion_ci(0.95, method="wilson")
        for size, good in probes.items()
    }
    resolved_pass = max((size for size, each in wilson.items() if each.low >= share), default=0)
    resolved_fail = min((size for size, each in wilson.items() if each.high < share), default=1024)
    return (low, high), (resolved_pass, resolved_fail)


def smooth_isotonic(
    requests: RequestSet, sizes: Sequence[int], log_factor: float, stream: np.random.Generator
) -> Bounds:
    """PAVA and PCHIP on the margin, its root sent ten times on the same server, a bootstrap of the margin there."""
    noise = LOAD_SD * stream.standard_normal(len(sizes))
    margins = np.exp(requests.log_ratios(sizes) + log_factor + noise) - 1
    fit = isotonic_regression(margins).x
    curve = PchipInterpolator(sizes, fit + 1e-9 * np.arange(len(sizes)))
    if not curve(sizes[0]) < 0 < curve(sizes[-1]):
        return math.nan, math.nan
    root = brentq(curve, sizes[0], sizes[-1])
    again = np.exp(requests.log_ratio(round(root)) + log_factor + LOAD_SD * stream.standard_normal(10)) - 1
    means = again[stream.integers(10, size=(1000, 10))].mean(axis=1)
    slope = float(curve.derivative()(root))
    low, high = np.quantile(means, (0.025, 0.975))
    return round(root) - high / slope, round(root) - low / slope


def bootstrapped(
    ordered: Sequence[Floats], sizes: Sequence[int], share: float, stream: np.random.Generator
) -> Bounds:
    """The whole isotonic fit with requests drawn again, each as if independent, at every size.

    The j-th smallest of n that are drawn again is that of rank ceil(n U), where U ~ Beta(j, n - j + 1).
    """
    columns = []
    for ratios in ordered:
        n, j = len(ratios), math.ceil(share * len(ratios))
        columns.append(np.log(ratios[np.ceil(n * stream.beta(j, n - j + 1, size=300)).astype(int) - 1]))
    drawn = [crossing(sizes, logs).size for logs in np.transpose(columns).tolist()]
    known = [size for size in drawn if size is not None]
    low, high = np.quantile(known, (0.025, 0.975)) if known else (math.nan, math.nan)
    return float(low), float(high)


def intervals(requests: RequestSet, launch_sd: float, name: str) -> Iterator[tuple[str, Bounds]]:
    """95 % intervals of the capacity: of searches on the first launch, of eight pooled, and of eight blocks."""
    stream = np.random.default_rng(list(name.encode()))
    log_factors = launch_sd * stream.standard_normal(BLOCKS)
    sizes = grid_of(requests, 0.0, log_factors)
    tight, resolved = bisected(requests, log_factors[0], stream)
    yield "bisection: last pass, first failure", tight
    yield "bisection: Wilson's interval", resolved
    yield "isotonic: bootstrap of the margin", smooth_isotonic(requests, sizes, log_factors[0], stream)
    noise = LOAD_SD * stream.standard_normal((BLOCKS, len(sizes)))
    each = [
        [requests.ratios(size) * math.exp(f + noise[i, j]) for j, size in enumerate(sizes)]
        for i, f in enumerate(log_factors)
    ]
    share = requests.objective.share
    yield "isotonic: bootstrap of requests", bootstrapped(each[0], sizes, share, stream)
    pooled = [np.sort(np.concatenate(of_size)) for of_size in zip(*each, strict=True)]
    yield "the same, eight launches as one", bootstrapped(pooled, sizes, share, stream)
    logs = requests.log_ratios(sizes)
    levels = [crossing(sizes, logs + f + noise[i]).size for i, f in enumerate(log_factors)]
    known = [level for level in levels if level is not None]
    level = math.exp(sum(map(math.log, known)) / len(known)) if known else math.nan
    yield "eight blocks", level_interval(levels, level, 0.95) or (math.nan, math.nan)


class Outcome(NamedTuple):
    """All that is asked of one request set."""

    own: float
    """Its capacity by brute force."""
    ended: dict[tuple[float, float], Ended]
    """By planted change and launch scatter."""
    bounds: dict[tuple[str, float], Bounds]
    """Intervals by method and launch scatter."""


def experiment(objective: Objective, number: int, truth: Truth) -> Outcome:
    requests = RequestSet(_drawn(1000, f"set {number}"), objective)
    dense = range(round(0.7 * CENTRE), round(1.4 * CENTRE) + 1)
    own = crossing(dense, requests.log_ratios(dense)).size
    assert own is not None
    name = f"{objective.name} {number}"
    ended = {
        (change, sd): measured(requests, sd, speed, change, f"{name} {sd} {change}")
        for sd in LAUNCH_SDS[1:]
        for change, speed in ((PLANTED, truth.log_speed), (0.0, 0.0))
    }
    bounds = {(method, sd): ends for sd in LAUNCH_SDS for method, ends in intervals(requests, sd, f"{name} {sd}")}
    return Outcome(own, ended, bounds)


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    print()


def _demanded(demand: Demand | None, *shares: Share) -> str:
    if demand is None:
        return "-"
    return f"{demand} {'ok' if all(map(demand.is_met, shares)) else 'FAIL'}"


def report(objective: Objective, truth: Truth, outcomes: Sequence[Outcome], *, demands: bool) -> None:
    """Print the tables of one objective; demands are those of a launch scatter of 1 %."""
    own, number = [outcome.own for outcome in outcomes], len(outcomes)
    print(
        f"### {objective.name}\n\nTrue capacity {truth.size:.2f} requests at once, elasticity "
        f"{truth.elasticity:.2f}; that of 1,000 requests scatters by {100 * float(np.std(np.log(own))):.2f} % "
        f"between request sets. {number} experiments.\n"
    )
    verdicts, errors = [], []
    for sd in LAUNCH_SDS[1:]:
        planted, equal = ([outcome.ended[change, sd] for outcome in outcomes] for change in (PLANTED, 0.0))
        is_demanded = demands and sd <= LAUNCH_SDS[1]
        called = Share(sum(each.verdict == "improvement" for each in planted), number)
        false = Share(sum(each.verdict in {"improvement", "regression"} for each in equal), number)
        covered = [Share(sum(each.covers_ratio for each in of), number) for of in (planted, equal)]
        verdicts.append(
            (
                f"{100 * sd:g} %",
                called,
                _demanded(Demand(low=0.9) if is_demanded else None, called),
                covered[0],
                false,
                _demanded(SELDOM if demands else None, false),
                covered[1],
            )
        )
        levels = [each.level for each in equal]
        of_law = Share(sum(abs(level / truth.size - 1) <= 0.02 for level in levels), number)
        of_set = Share(sum(abs(level / one - 1) <= 0.02 for level, one in zip(levels, own, strict=True)), number)
        errors.append(
            (f"{100 * sd:g} %", of_set, _demanded(NEARLY_ALWAYS if is_demanded else None, of_set), of_law)
        )
    heads = ("+5 % called, %", "demanded", "ratio covered, %", "equal arms called different, %", "demanded")
    _table(("launch scatter", *heads, "ratio covered, %"), verdicts)
    _table(("launch scatter", "level within 2 % of brute force, %", "demanded", "of the law, %"), errors)
    rows = []
    for method in dict.fromkeys(method for method, _ in outcomes[0].bounds):
        cells = [method]
        for sd in LAUNCH_SDS:
            bounds = [outcome.bounds[method, sd] for outcome in outcomes]
            share = np.mean([low <= one <= high for (low, high), one in zip(bounds, own, strict=True)])
            width = np.nanmedian([math.log(high / low) / 2 if low > 0 else math.nan for low, high in bounds])
            cells.append(f"{100 * share:.0f} (±{100 * width:.1f} %)")
        rows.append(cells)
    columns = (f"launches {100 * sd:g} %" for sd in LAUNCH_SDS)
    _table(("95 % interval covers the capacity of these requests, %", *columns), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=50)
    parser.add_argument("--true-requests", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        for objective in OBJECTIVES:
            truth = truth_of_law(objective, options.true_requests)
            numbers = range(options.experiments)
            one = [objective] * len(numbers), numbers, [truth] * len(numbers)
            outcomes = list(pool.map(experiment, *one))
            report(objective, truth, outcomes, demands=objective is OBJECTIVES[0])


if __name__ == "__main__":
    main()
