"""Would two arms side by side, each on a core of its own, be compared more precisely than arms in turns?

Duet benchmarking (Bulej et al., arXiv 2001.05811): a disturbance that hits both arms at the same time cancels in
their ratio. Here both arms are the same vLLM, so that the true ratio is 1. A pair of servers takes the same load in
three ways, which alternate round by round, beside processes that compute in bursts:

* *side by side*: both servers at the same time, each with its client on one core; twice, as long as in turns;
* *in turns, one core*: one server after the other, each on the core that it has side by side;
* *in turns, all cores*: one server after the other, each with all cores.

Places, and which arm begins, are swapped from round to round. Side by side, steps count while both loads last.
The scatter is that of ln(B / A) of a round around the mean of its pair of servers; the interval at the same machine
time is as wide as the scatter times the square root of the seconds of a round. Needs two cores and the engine vllm;
a pair takes one to two minutes to start.

    python -m benchmarks.verdict.side_by_side [--pairs 5] [--rounds 12] [--waves 2] [--busy 2] [--json FILE]
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
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from benchctl.records.schema import StepRecord
from benchmarks.common.busy import busy_processes
from benchmarks.common.harness import Figures, options, show, write
from benchmarks.common.pinned_vllm import PinnedServer, Window, load_together, mean_step_ns, pinned_vllm

DUET, ONE_CORE, ALL_CORES = "side by side", "in turns, one core", "in turns, all cores"
WAYS: Final = (DUET, ONE_CORE, ALL_CORES)
METRICS: Final = ("step_ms", "token_ms")
"""Mean step of the engine's log; the client's wall time of a token of each answer."""
PORTS: Final = (18411, 18412)
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
        servers = [
            stack.enter_context(pinned_vllm(model, i, port, directory / f"{number}-{i}"))
            for i, port in enumerate(PORTS)
        ]
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


def scatter(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, int]:
    """Standard deviation of ln(B / A) of a round around the mean of its pair, and its degrees of freedom."""
    squares, df = 0.0, 0
    for pair in {row["pair"] for row in rows}:
        values: NDArray[np.float64] = np.array([row[metric] for row in rows if row["pair"] == pair])
        squares += float(((values - values.mean()) ** 2).sum())
        df += len(values) - 1
    return math.sqrt(squares / df), df


def table(rows: Sequence[Mapping[str, Any]]) -> list[Figures]:
    """For each metric and way its scatter, and the width of its interval at equal time beside that in turns."""
    lines: list[Figures] = []
    for metric in METRICS:
        widths: dict[str, tuple[float, float]] = {}
        for way in WAYS[::-1]:
            own = [row for row in rows if row["way"] == way]
            (sd, df), seconds = scatter(own, metric), fmean(row["s"] for row in own)
            means = [row[metric] for row in own]
            half = t.ppf(0.975, df) * sd / math.sqrt(len(own))
            place = [fmean(row[metric] for row in own if row["place"] == core) for core in (0, 1)]
            widths[way] = sd * math.sqrt(seconds), df
            line = {
                "metric": metric,
                "way": way,
                "rounds": len(own),
                "s of a round": seconds,
                "scatter, %": 100 * sd,
                "A/A, %": f"{100 * fmean(means):+.2f} +- {100 * half:.2f}",
                "A on core 0 less core 1, %": 100 * (place[0] - place[1]),
            }
            for other in WAYS[:0:-1]:
                if other in widths and other != way:
                    line[f"width / {other}"] = ratio_text(widths[way], widths[other])
            lines.append(line)
    return lines


def ratio_text(own: tuple[float, float], other: tuple[float, float]) -> str:
    """The ratio of two widths with its 95 % interval, as of independent normal scatters (ln s has 1 / (2 df))."""
    ratio, half = own[0] / other[0], 1.96 * math.sqrt(0.5 / own[1] + 0.5 / other[1])
    return f"{ratio:.2f} [{ratio * math.exp(-half):.2f}, {ratio * math.exp(half):.2f}]"


def main() -> None:
    chosen = options(__doc__, pairs=5, rounds=12, waves=2, busy=2, read=[""])
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
