"""Is a backlog that grows named where requests arrive faster than a server answers, and nowhere else?

Simulated servers in virtual time, without noise, with 16 or 64 sequences at most. What a server answers is measured
first, in a closed loop of four times as many slots; then requests arrive at random (Poisson) at a share of that.
Every experiment draws lengths and times of its own. The same output every time. Ends with exit code 1 when a demand
is refuted.

    python -m benchmarks.verdict.backlog_truth [--experiments 100] [--jobs 2]
"""

import argparse
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np

from benchctl.analysis.metrics.steady import MIN_REQUESTS
from benchctl.analysis.statistics.trend import BATCH, mser5
from benchctl.analysis.validity.steadiness import backlog_growth
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.requests import CountedRequests
from benchctl.sim.simulation import RequestColumns, simulate
from benchctl.units import NS_PER_S
from benchmarks.common.harness import show
from benchmarks.verdict.begin_truth import LAWS
from benchmarks.verdict.shares import Demand, row

SEQUENCES: Final = (16, 64)
NUM_REQUESTS: Final = (300, 600, 1500, 3000)
NEVER: Final = Demand(0.0, 0.02)
ALWAYS: Final = Demand(0.98, 1.0)
DEMANDS: Final = {
    0.5: (600, NEVER),
    0.8: (600, NEVER),
    0.9: (600, NEVER),
    1.1: (3000, Demand(0.9, 1.0)),
    1.3: (1500, ALWAYS),
    3.0: (300, ALWAYS),
}
"""By the share of what a server answers at which requests arrive, with the number of requests from which it holds:
a shorter load at random times may have met fewer than the server answers."""


def lengths(num_requests: int, seed: int) -> CountedRequests:
    """Requests of the law of chats: log-normal, with a coefficient of variation of 0.9."""
    law, stream = LAWS[0], random.Random(seed)
    pairs = [(law.prompt(stream), law.output(stream)) for _ in range(num_requests)]
    return CountedRequests(*zip(*pairs, strict=True))


def answered_per_s(sequences: int) -> float:
    """Requests that a server answers per second while more are waiting."""
    load = SimLoad(requests=lengths(6_000, 99), max_concurrency=4 * sequences)
    ended = simulate(SimConfig(max_num_seqs=sequences, noise="none"), [load], keeps_steps=False).requests
    ends_ns = np.sort(ended.last_token_ns)[1_000:5_500]
    return (len(ends_ns) - 1) / ((ends_ns[-1] - ends_ns[0]) / NS_PER_S)


def is_named(seed: int, *, sequences: int, num_requests: int, rate: float) -> dict[str, bool]:
    """Whether the backlog of one load is named."""
    stream = random.Random(f"times {seed}")
    gaps_s = (stream.expovariate(rate) for _ in range(num_requests))
    due_ns = np.array([round(at_s * NS_PER_S) for at_s in accumulate(gaps_s)])
    load = SimLoad(requests=lengths(num_requests, seed), arrival_ns=due_ns.tolist())
    ended = simulate(SimConfig(max_num_seqs=sequences, noise="none"), [load], keeps_steps=False).requests
    return {"named": backlog_growth(due_ns, ended.last_token_ns, _window_ns(due_ns, ended)) is not None}


def _window_ns(due_ns: np.ndarray, ended: RequestColumns) -> int | None:
    """The begin of the steady window, by its rule for first-token times."""
    first_ns, last_ns = np.empty_like(due_ns), np.empty_like(due_ns)
    first_ns[ended.index], last_ns[ended.index] = ended.first_token_ns, ended.last_token_ns
    stride = BATCH * max(1, round(len(due_ns) / 20 / BATCH))
    end = int((last_ns > due_ns[-1]).argmax()) // stride * stride
    return int(due_ns[mser5((first_ns - due_ns)[:end], stride)]) if end >= MIN_REQUESTS else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for sequences in SEQUENCES:
            answered = answered_per_s(sequences)
            for num_requests in NUM_REQUESTS:
                for share, (least_requests, demand) in DEMANDS.items():
                    one = partial(is_named, sequences=sequences, num_requests=num_requests, rate=share * answered)
                    condition = {"sequences": sequences, "requests": num_requests, "arrive / answered": share}
                    demands = {"named": demand} if num_requests >= least_requests else {}
                    rows.append(row(condition, pool.map(one, range(options.experiments)), demands))
    show([each.cells() for each in rows], f"{options.experiments} experiments each, per cent")
    return int(any(each.failures for each in rows))


if __name__ == "__main__":
    sys.exit(main())
