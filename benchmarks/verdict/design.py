"""Is several loads on one server a good design, and does ``auto`` choose a cheap one? Experiments of known truth.

Servers scatter, and loads scatter on each server; the value of a run is the mean of the logarithms of its loads.
Orders, estimates, verdicts, variance components and the choice of ``auto`` are those of benchctl. Costs are seconds
times variance, relative to the cheapest of 1, 3 and 7 loads on every server. The same output every time.

    python -m benchmarks.verdict.design [--experiments N] [--sections NAME...]
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.statistics.components import Components, Costs, loads_for_least_cost, variance_components
from benchctl.profile.bounds import PILOT_LOADS
from benchctl.profile.planning import PILOT_BLOCKS
from benchmarks.common.harness import show
from benchmarks.verdict.known_truth import Made, covers, is_found, judge, make, named_stream
from benchmarks.verdict.named_noise import Values
from benchmarks.verdict.shares import COVERS, SELDOM, Demand, Row, row

BETWEEN: Final = (0.01, 0.03, 0.1)
WITHIN: Final = (0.01, 0.03, 0.1, 0.3)
DESIGNS: Final = (1, 3, 7, None)
"""Loads of each server; None: auto."""
SERVER_COSTS: Final = {"GPU: 80 + 30 s": Costs(80, 30), "vLLM on CPU: 20.9 + 1.25 s": Costs(20.9, 1.25)}
"""Start and end of a server, and a load."""
NUM_BLOCKS: Final = 12
WITHIN_15_PERCENT: Final = 1.15

Loads: TypeAlias = NDArray[np.float64]
"""Logarithms, a row for each server in the order of the runs."""


@dataclass(frozen=True, slots=True)
class TwoLevels:
    """Noise of runs whose servers get several loads each; with ``num_loads`` None auto chooses as benchctl does."""

    between: float
    within: float
    num_loads: int | None
    costs: Costs
    num_blocks: int = NUM_BLOCKS

    def __call__(self, stream: np.random.Generator, is_baseline: NDArray[np.bool_], _ratio_sd: float) -> Values:
        """Two arms; the values of a block of runs follow one another."""
        servers = stream.normal(0, self.between, len(is_baseline))
        if self.num_loads is not None:
            return servers + stream.normal(0, self.within, (len(servers), self.num_loads)).mean(axis=1)
        pilot = servers[: 2 * PILOT_BLOCKS, None] + stream.normal(0, self.within, (2 * PILOT_BLOCKS, PILOT_LOADS))
        rest = servers[len(pilot) :]
        later = stream.normal(0, self.within, (len(rest), self.chosen(pilot))).mean(axis=1)
        return np.concatenate([pilot.mean(axis=1), rest + later])

    def chosen(self, pilot: Loads) -> int:
        """The number of loads that auto chooses after this pilot."""
        components = components_of(pilot)
        assert components is not None
        return loads_for_least_cost([components.evidence], self.costs, PILOT_BLOCKS, self.num_blocks)

    def cost_of(self, num_pilot: int, pilot_loads: int, num_loads: int) -> float:
        """Seconds times variance of an experiment with two arms."""
        numbers = np.array([pilot_loads] * num_pilot + [num_loads] * (self.num_blocks - num_pilot))
        seconds = np.sum(self.costs.starts_s + numbers * self.costs.load_s)
        return float(seconds * np.mean(self.between**2 + self.within**2 / numbers) / self.num_blocks)


def components_of(loads: Loads) -> Components | None:
    return variance_components(
        {(i // 2, str(i % 2)): dict(enumerate(of_server, start=1)) for i, of_server in enumerate(loads.tolist())}
    )


def coverage(n: int) -> Iterator[Row]:
    """Do 95 % intervals of the ratio hold the truth, and is a change called that is not there?"""
    made = Made(num_blocks=NUM_BLOCKS)
    for between, within, num_loads in product(BETWEEN, WITHIN, DESIGNS):
        noise, stream = (
            TwoLevels(between, within, num_loads, Costs(80, 30)),
            named_stream(between, within, num_loads),
        )
        judged = (judge(make(made, stream, noise), made)[0] for _ in range(n))
        events = (
            {"covers": covers(each, 0.0), "change called": each.verdict in {"regression", "improvement"}}
            for each in judged
        )
        condition = {"between": f"{between:.0%}", "within": f"{within:.0%}", "loads": num_loads or "auto"}
        yield row(condition, events, {"covers": COVERS, "change called": SELDOM})


def components(n: int) -> Iterator[Row]:
    """Do the intervals of the variance components hold the planted ones, two arms of eight blocks?"""
    for between, within, num_loads in product(BETWEEN, WITHIN, (3, 7)):
        stream = named_stream("components", between, within, num_loads)
        events = []
        for _ in range(n):
            servers = stream.normal(0, between, (16, 1)) + stream.normal(0, 0.05, 8).repeat(2)[:, None]
            each = components_of(servers + stream.normal(0, within, (16, num_loads)))
            assert each is not None
            truths = (
                ("between", each.between, between),
                ("within", each.within, within),
                ("drift", each.drift, 0.0),
            )
            events.append({name: (e.low or 0) <= truth <= (e.high or 0) for name, e, truth in truths})
        condition = {"scatter between": f"{between:.0%}", "scatter within": f"{within:.0%}", "loads": num_loads}
        yield row(condition, events, dict.fromkeys(("between", "within", "drift"), COVERS))


def cost(n: int) -> list[dict[str, str]]:
    """The mean cost of auto and of each fixed design, relative to the cheapest of those; at most 1.15 is wanted."""
    rows = []
    for name, num_blocks in product(SERVER_COSTS, (8, NUM_BLOCKS, 20)):
        of_auto, of_fixed = [], []
        for between, within in product(BETWEEN, WITHIN):
            noise = TwoLevels(between, within, None, SERVER_COSTS[name], num_blocks)
            fixed = [noise.cost_of(0, 1, number) for number in (1, 3, 7)]
            stream, chosen = named_stream("cost", name, between, within), []
            for _ in range(n):
                servers = stream.normal(0, between, (2 * PILOT_BLOCKS, 1))
                chosen.append(noise.chosen(servers + stream.normal(0, within, (2 * PILOT_BLOCKS, PILOT_LOADS))))
            auto = np.mean([noise.cost_of(PILOT_BLOCKS, PILOT_LOADS, number) for number in chosen])
            of_auto.append(float(auto / min(fixed)))
            of_fixed.append([each / min(fixed) for each in fixed])
            if num_blocks == NUM_BLOCKS:
                rows.append(
                    {
                        "server": name,
                        "blocks": str(num_blocks),
                        "between": f"{between:.0%}",
                        "within": f"{within:.0%}",
                    }
                    | {f"{number} loads": f"{of_fixed[-1][i]:.2f}" for i, number in enumerate((1, 3, 7))}
                    | {"auto": f"{of_auto[-1]:.2f}", "loads of auto, median": f"{np.median(chosen):.0f}"}
                )
        means = np.mean(of_fixed, axis=0)
        verdict = "" if num_blocks < NUM_BLOCKS else "ok" if np.mean(of_auto) <= WITHIN_15_PERCENT else "FAIL"
        rows.append(
            {"server": name, "blocks": str(num_blocks), "between": "mean of all"}
            | {f"{number} loads": f"{means[i]:.2f}" for i, number in enumerate((1, 3, 7))}
            | {"auto": f"{np.mean(of_auto):.3f} {verdict}"}
        )
    return rows


Machine: TypeAlias = Callable[[np.random.Generator, int, int], Loads]
"""(stream, servers, loads of each) to what the machine does to each load, in the order of time."""

BETWEEN_LOADS_SHARE: Final = 30 / 110
"""Time from load to load on a server, of that from server to server with one load: 80 s a start, 30 s a load."""


def nothing_else(_: np.random.Generator, num_servers: int, num_loads: int) -> Loads:
    return np.zeros((num_servers, num_loads))


def outliers(share: float, slower: float) -> Machine:
    """A share of all loads is slower."""
    return lambda stream, servers, loads: np.where(stream.random((servers, loads)) < share, math.log1p(slower), 0.0)


def regimes(gap: float, switching: float) -> Machine:
    """The machine has two speeds; in the time of one server with one load it changes with this chance."""

    def machine(stream: np.random.Generator, num_servers: int, num_loads: int) -> Loads:
        chances = np.full((num_servers, num_loads), 1 - (1 - switching) ** BETWEEN_LOADS_SHARE)
        chances[:, 0] = switching
        switches = stream.random(chances.shape) < chances
        is_slow = (np.cumsum(switches) + stream.integers(2)) % 2 == 1
        return np.where(is_slow, math.log1p(gap), 0.0).reshape(chances.shape)

    return machine


def clock_steps(num_steps: int) -> Machine:
    """The level of the machine jumps so many times in an experiment, by 5 to 10 % up or down."""

    def machine(stream: np.random.Generator, num_servers: int, num_loads: int) -> Loads:
        levels = np.zeros(num_servers * num_loads)
        for _ in range(num_steps):
            begins = stream.integers(1, len(levels))
            levels[begins:] += stream.choice([-1.0, 1.0]) * math.log1p(stream.uniform(0.05, 0.1))
        return levels.reshape(num_servers, num_loads)

    return machine


MACHINES: Final[dict[str, tuple[Machine, float, float | None]]] = {
    "log-normal": (nothing_else, 0.032, 0.95),
    "outliers, 10 % of loads by 10 %": (outliers(0.1, 0.1), 0.011, 0.95),
    "regimes, 8 % apart, 0.1": (regimes(0.08, 0.1), 0.0375, None),
    "two clock steps": (clock_steps(2), 0.0315, 0.80),
    "outliers, 10 % of loads by 30 %": (outliers(0.1, 0.3), 0.015, None),
    "regimes, 10 % apart, 0.2": (regimes(0.10, 0.2), 0.025, None),
}
"""What the machine does beside the scatter, the scatter of a block log-ratio of one load each, and what share of
changes four loads are to find. The scatter is such that one load finds about 81.5, 85.5, 54.5 and 60.5 %."""
POWER_LOADS: Final = (1, 2, 4, 8, 16, 50)


def power(n: int) -> Iterator[Row]:
    """A true +5 %, margin 1 %, eight blocks, twice as much scatter within as between: is the change found?

    In regimes the goal is 80 %, and the row is the bound that forbids it: no number of loads reaches it, because a
    server with more loads takes longer, and the machine changes its speed between two servers nevertheless.
    ``4, median``: with the median over the loads as the value of a run, which benchctl does not take.
    """
    for name, (machine, scatter, goal) in MACHINES.items():
        made = Made(num_blocks=8, ratio_sd=scatter, change_frac=0.05)
        finds: dict[str, list[bool]] = {}
        for label, num_loads, centre in [*((str(k), k, np.mean) for k in POWER_LOADS), ("4, median", 4, np.median)]:
            stream, noise = named_stream("power", name, num_loads), split_noise(machine, num_loads, centre)
            finds[label] = [is_found(judge(make(made, stream, noise), made)) for _ in range(n)]
        events = (dict(zip(finds, found, strict=True)) for found in zip(*finds.values(), strict=True))
        demands = {} if goal is None else {"4": Demand(low=goal)}
        yield row({"machine": name, "scatter": f"{scatter:.2%}"}, events, demands)


def split_noise(machine: Machine, num_loads: int, centre: Callable[..., Values]) -> Callable[..., Values]:
    """Scatter of which a fifth of the variance is that of servers, four fifths that of loads, and the machine's."""

    def noise(stream: np.random.Generator, is_baseline: NDArray[np.bool_], ratio_sd: float) -> Values:
        between, num_servers = ratio_sd / math.sqrt(10), len(is_baseline)
        loads = stream.normal(0, 2 * between, (num_servers, num_loads)) + machine(stream, num_servers, num_loads)
        return stream.normal(0, between, num_servers) + centre(loads, axis=1)

    return noise


SECTIONS: Final[dict[str, Callable[[int], Iterator[Row]]]] = {
    "coverage": coverage,
    "components": components,
    "power": power,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=1000, metavar="N", help="for each row")
    parser.add_argument("--sections", nargs="+", choices=[*SECTIONS, "cost"], default=[*SECTIONS, "cost"])
    options = parser.parse_args()
    failures = 0
    for name in options.sections:
        if name == "cost":
            rows = cost(options.experiments)
            failures += sum("FAIL" in each["auto"] for each in rows)
            show(rows, cost.__doc__ or "")
            continue
        of_section = list(SECTIONS[name](options.experiments))
        failures += sum(bool(each.failures) for each in of_section)
        show([each.cells() for each in of_section], SECTIONS[name].__doc__ or "")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
