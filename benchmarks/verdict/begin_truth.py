"""The tail of first tokens of a stationary closed loop, beside that of loads that begin drained and running.

The truth is one long load of the same law, without its beginning. Every load of the table draws its own lengths, as
one of so many experiments would.

    python -m benchmarks.verdict.begin_truth [--loads 40] [--requests 1500]
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchctl.records.record import PreparedRequest
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.requests import CountedRequests
from benchctl.sim.simulation import simulate
from benchctl.workload.opening import running_requests

Floats: TypeAlias = NDArray[np.float64]
Draw: TypeAlias = Callable[[random.Random], int]
_WORD_TOKENS: Final = 2
"""Of the word before each prompt of an opening, as the simulator counts it."""
_LEFT_OUT: Final = 3_000
"""Requests of the long load that are not counted."""
_TOLERANCE_FRAC: Final = 0.03


def _log_normal(mean: float, cv: float, most: int) -> Draw:
    sigma = math.sqrt(math.log(1 + cv**2))
    mu = math.log(mean) - sigma**2 / 2
    return lambda stream: max(1, min(most, round(stream.lognormvariate(mu, sigma))))


def _exponential(mean: float, most: int) -> Draw:
    return lambda stream: max(1, min(most, round(stream.expovariate(1 / mean))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Random lengths of prompts and outputs, and the slots of the closed loop."""

    name: str
    slots: int
    prompt: Draw
    output: Draw
    max_num_batched_tokens: int = 8192


LAWS: Final = (
    Law(name="chat", slots=32, prompt=_log_normal(350, 0.9, 4000), output=_log_normal(180, 0.9, 1500)),
    Law(name="chat, small steps", slots=32, prompt=_log_normal(350, 0.9, 4000), output=_log_normal(180, 0.9, 1500),
        max_num_batched_tokens=1024),
    Law(name="exponential", slots=32, prompt=_exponential(300, 4000), output=_exponential(200, 2000)),
    Law(name="long prompts", slots=16, prompt=_log_normal(2500, 0.6, 12_000), output=_log_normal(80, 0.6, 500)),
    Law(name="many slots", slots=96, prompt=_log_normal(250, 0.6, 2000), output=_log_normal(200, 0.6, 1500)),
)  # fmt: skip


def _drawn(law: Law, num_requests: int, seed: int) -> list[PreparedRequest]:
    stream = random.Random(seed)
    return [
        PreparedRequest(
            request_id=str(i), index=i, arrival_ns=0, prompt="", prompt_tokens=law.prompt(stream),
            max_tokens=law.output(stream), seed=0, source="",
        )
        for i in range(num_requests)
    ]  # fmt: skip


def _first_tokens_ms(law: Law, opening: Sequence[PreparedRequest], requests: Sequence[PreparedRequest]) -> Floats:
    """Time to first token of ``requests``, in the order of their sends."""
    sent = CountedRequests(
        [each.prompt_tokens + _WORD_TOKENS for each in opening] + [each.prompt_tokens for each in requests],
        [each.max_tokens for each in (*opening, *requests)],
    )
    config = SimConfig(max_num_batched_tokens=law.max_num_batched_tokens)
    load = SimLoad(requests=sent, max_concurrency=law.slots)
    ended = simulate(config, [load], keeps_steps=False).requests
    in_order = np.argsort(ended.index)
    ttft = (ended.first_token_ns - ended.arrival_ns)[in_order] / 1e6
    return np.asarray(ttft[len(opening) :], dtype=np.float64)


def percentiles_of(law: Law, *, num_requests: int, num_loads: int, num_true: int) -> tuple[float, float, float]:
    """p99 of the time to first token in ms: of the long load, and of all requests of loads begun in either way."""
    rows = loads_of(law, num_requests=num_requests, num_loads=num_loads, num_true=num_true)
    truth, drained, running = (float(np.quantile(np.concatenate(values), 0.99)) for values in rows)
    return truth, drained, running


def loads_of(
    law: Law, *, num_requests: int, num_loads: int, num_true: int
) -> tuple[list[Floats], list[Floats], list[Floats]]:
    """Times to first token: of the long load alone, and of each load that began drained, and running."""
    truth = _first_tokens_ms(law, (), _drawn(law, num_true, 1))[_LEFT_OUT:]
    sets = [_drawn(law, num_requests, 1000 + number) for number in range(num_loads)]
    drained = [_first_tokens_ms(law, (), requests) for requests in sets]
    running = [_first_tokens_ms(law, running_requests(requests, law.slots), requests) for requests in sets]
    return [truth], drained, running


def _error(loads: Sequence[Floats], truth: float) -> tuple[float, str]:
    """Relative error of p99 over all ``loads``, and in words with its bootstrap interval over loads."""
    pooled = float(np.quantile(np.concatenate(loads), 0.99)) / truth - 1
    stream = np.random.default_rng(1)
    draws = [
        np.quantile(np.concatenate([loads[i] for i in stream.integers(len(loads), size=len(loads))]), 0.99)
        for _ in range(200)
    ]
    low, high = np.quantile(draws, (0.025, 0.975)) / truth - 1
    return pooled, f"{100 * pooled:+.1f} % [{100 * low:+.1f}, {100 * high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=40)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--true-requests", type=int, default=300_000)
    options = parser.parse_args()
    print(
        "| law | slots | p99 TTFT, stationary | drained: error | running: error | mean TTFT: drained | running | |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for law in LAWS:
        truths, drained, running = loads_of(
            law, num_requests=options.requests, num_loads=options.loads, num_true=options.true_requests
        )
        truth, mean = float(np.quantile(truths[0], 0.99)), float(truths[0].mean())
        _, drained_text = _error(drained, truth)
        error, running_text = _error(running, truth)
        means = [f"{100 * (np.concatenate(loads).mean() / mean - 1):+.1f} %" for loads in (drained, running)]
        verdict = "ok" if abs(error) <= _TOLERANCE_FRAC else "FAIL"
        cells = (law.name, law.slots, f"{truth:.2f} ms", drained_text, running_text, *means, verdict)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
