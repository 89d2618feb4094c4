"""Would two arms side by side, each on a core of its own, be compared more precisely than arms in turns?

Duet benchmarking (Bulej et al., arXiv 2001.05811): a disturbance that hits both arms at the same time cancels in
their ratio. Here both arms are the same vLLM, so that the true ratio is 1. A pair of servers takes the same load in
three ways, which alternate round by round, beside processes that compute in bursts:

* *side by side*: both servers at the same time, each with its client on one core; twice, as long as in turns;
* *in turns, one core*: one server after the other, each on the core that it has side by side;
* *in turns, all cores*: one server after the other, each with all cores.

Places, and which arm begins, are swapped from round to round, and which arm starts first from pair to pair.
Side by side, steps count while both loads last. Intervals are those of benchctl's estimator for ln(B / A) of the
rounds, without what differs between pairs of servers. At the same machine time one is as wide as it is here times
the square root of the time that all rounds took; ratios of these widths have 95 % intervals, by drawing rounds
anew. Whether the ratio is 1 is asked of the means of the pairs, because two servers of one kind differ. Needs two
cores and the engine vllm; a pair takes one to two minutes to start.

    python -m benchmarks.verdict.side_by_side [--pairs 6] [--rounds 8] [--waves 2] [--busy 2] [--json FILE]
    python -m benchmarks.verdict.side_by_side --read FILE...
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np

from benchctl.analysis.statistics.estimate import RatioEstimate, estimate_paired
from benchctl.analysis.statistics.intervals import t_quantile
from benchctl.records.schema import StepRecord
from benchmarks.common.busy import busy_processes
from benchmarks.common.harness import Figures, options, show, write
from benchmarks.common.pinned_vllm import PinnedServer, Window, load_together, mean_step_ns, pinned_vllm

DUET, ONE_CORE, ALL_CORES = "side by side", "in turns, one core", "in turns, all cores"
WAYS: Final = (DUET, ONE_CORE, ALL_CORES)
METRICS: Final = ("step_ms", "token_ms")
"""Mean step of the engine's log; the client's wall time of a token of each answer."""
PORTS: Final = (18411, 18412)
DRAWS: Final = 200
Row = Mapping[str, Any]
"""Of one round in one way: pair, place of A, seconds, and ln(B / A) of each metric."""
Loads = tuple[tuple[Window, ...], tuple[Window, ...]]
"""Those of both arms in one round."""


def load(servers: Sequence[PinnedServer], cores: Sequence[Sequence[int]], waves: int) -> list[Window]:
    """One load of each of these servers at the same time, server and client on its cores."""
    for server, own in zip(servers, cores, strict=True):
        server.move(own)
    return load_together(servers, cores, waves)


def one_round(way: str, servers: Sequence[PinnedServer], places: Sequence[int], first: int, waves: int) -> Loads:
    """The loads of both arms; ``places`` are their cores, and the arm ``first`` begins where they take turns."""
    if way == DUET:
        twice = [load(servers, [[place] for place in places], waves) for _ in range(2)]
        return tuple(a for a, _ in twice), tuple(b for _, b in twice)
    every = range(os.cpu_count() or 2)
    windows = {
        i: load([servers[i]], [[places[i]] if way == ONE_CORE else every], waves) for i in (first, 1 - first)
    }
    return tuple(windows[0]), tuple(windows[1])


def measure_pair(model: str, number: int, num_rounds: int, waves: int, directory: Path) -> list[dict[str, Any]]:
    """The rounds of one pair of servers: a row for each way and round."""
    measured: list[tuple[str, int, Loads]] = []
    with ExitStack() as stack:
        arms = (0, 1) if number % 2 == 0 else (1, 0)  # which arm starts first, and on core 0, changes
        started = {
            arm: stack.enter_context(pinned_vllm(model, core, PORTS[arm], directory / f"{number}-{arm}"))
            for core, arm in enumerate(arms)
        }
        servers = [started[0], started[1]]
        for _ in range(2):
            load(servers, [[0], [1]], waves)
        for index in range(num_rounds):
            places = (0, 1) if index % 2 == 0 else (1, 0)
            turn = index % len(WAYS)
            measured += [
                (way, places[0], one_round(way, servers, places, (index // 2) % 2, waves))
                for way in (*WAYS[turn:], *WAYS[:turn])
            ]
        steps = [server.steps() for server in servers]
    return [
        {"pair": number, "way": way, "place": place, **figures(way, loads, steps)} for way, place, loads in measured
    ]


def figures(way: str, loads: Loads, steps: Sequence[Sequence[StepRecord]]) -> dict[str, float]:
    """ln(B / A) of each metric in one round, and the seconds that it took."""
    logs: dict[str, list[float]] = {name: [] for name in METRICS}
    for a, b in zip(*loads, strict=True):
        counted = ((max(a[0], b[0]), min(a[1], b[1])),) * 2 if way == DUET else (a, b)
        step_ns = [mean_step_ns(own, window) for own, window in zip(steps, counted, strict=True)]
        logs["step_ms"].append(math.log(step_ns[1] / step_ns[0]))
        logs["token_ms"].append(math.log((b[1] - b[0]) / (a[1] - a[0])))
    windows = [window for own in loads for window in own]
    seconds = sum(end - start for start, end in windows) / 1e9
    return {**{name: fmean(values) for name, values in logs.items()}, "s": seconds / (2 if way == DUET else 1)}


def estimate_of(rows: Sequence[Row], metric: str) -> RatioEstimate:
    """The ratio over the rounds, of which each has what its pair of servers differs by from all removed."""
    mean = fmean(row[metric] for row in rows)
    by_pair = {row["pair"]: [each[metric] for each in rows if each["pair"] == row["pair"]] for row in rows}
    return estimate_paired([row[metric] - fmean(by_pair[row["pair"]]) + mean for row in rows])


def width(rows: Sequence[Row], metric: str) -> float:
    """Width of the interval that these rounds give, at the same machine time."""
    return (estimate_of(rows, metric).half_width or math.nan) * math.sqrt(sum(row["s"] for row in rows))


def width_ratios(own: Sequence[Row], others: Sequence[Row], metric: str) -> str:
    """Width of one way over that of another, with an interval: rounds of both ways are drawn together, by pair."""
    stream, ratios = np.random.default_rng(1), []
    rounds = [
        [i for i, row in enumerate(own) if row["pair"] == pair] for pair in dict.fromkeys(r["pair"] for r in own)
    ]
    for _ in range(DRAWS):
        drawn = [int(i) for indices in rounds for i in stream.choice(indices, len(indices))]
        ratios.append(width([own[i] for i in drawn], metric) / width([others[i] for i in drawn], metric))
    low, high = np.quantile(ratios, (0.025, 0.975))
    return f"{width(own, metric) / width(others, metric):.2f} [{low:.2f}, {high:.2f}]"


def mean_text(values: Sequence[float]) -> str:
    """The mean of logarithms with its 95 % interval, in per cent."""
    mean, half = 100 * fmean(values), math.nan
    if len(values) > 1:
        half = 100 * t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{mean:+.2f} +- {half:.2f}"


def table(rows: Sequence[Row]) -> list[Figures]:
    """For each metric and way the A/A interval, and its width at equal time beside that of turns."""
    lines: list[Figures] = []
    by_way = {way: [row for row in rows if row["way"] == way] for way in WAYS}
    for metric in METRICS:
        for way, own in by_way.items():
            pairs = {row["pair"]: [each[metric] for each in own if each["pair"] == row["pair"]] for row in own}
            places = [[row[metric] for row in own if row["place"] == core] for core in (0, 1)]
            lines.append(
                {
                    "metric": metric,
                    "way": way,
                    "rounds": len(own),
                    "s of a round": fmean(row["s"] for row in own),
                    "interval, +- %": 100 * (estimate_of(own, metric).half_width or math.nan),
                    "B / A - 1 of pairs, %": mean_text([fmean(values) for values in pairs.values()]),
                    "of A's place, %": f"{100 * (fmean(places[0]) - fmean(places[1])):+.2f}",
                    **{
                        f"width / {other}": width_ratios(own, by_way[other], metric)
                        for other in WAYS[1:]
                        if other != way
                    },
                }
            )
    return lines


def main() -> None:
    chosen = options(__doc__, pairs=6, rounds=8, waves=2, busy=2, read=[""])
    if any(chosen.read):
        rows = [
            row | {"pair": f"{name}-{row['pair']}"}
            for name in chosen.read
            for row in json.loads(Path(name).read_text())
        ]
    else:
        rows = []
        with tempfile.TemporaryDirectory() as name:
            directory, model = Path(name), str(Path(name) / "tiny")
            subprocess.run([sys.executable, "-m", "benchctl", "models", "make-tiny", model], check=True)
            with busy_processes(chosen.busy):
                for number in range(chosen.pairs):
                    rows += measure_pair(model, number, chosen.rounds, chosen.waves, directory)
                    print(f"pair {number + 1} of {chosen.pairs}", file=sys.stderr, flush=True)
                    write(chosen.json, rows)
    show(table(rows), f"vLLM against itself, beside {chosen.busy} processes that compute in bursts")


if __name__ == "__main__":
    main()
