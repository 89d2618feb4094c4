"""Does a load generator send when it says it does, and is what arrives the Poisson process that was asked for?

Each tool sends the same number of requests at the same rate to the paced server, twice with the same seed.

    scheduled -> sent       how late it sent by its own records, where it keeps a schedule
    scheduled -> arrived    the same by the kernel's stamps at the server: the first arrival is the origin
    rate                    requests per second that arrived
    KS distance             largest difference between the distribution of the gaps between arrivals and the
                            exponential one of the rate asked for; by chance it stays below the value printed under
                            the table in 95 of 100 series
    seed repeats            median difference of the gaps of the two runs, in ms: small where a seed fixes them

    python -m benchmarks.load.schedule_accuracy [--rate 200] [--duration-s 30] [--tools benchctl vllm ...]
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.common.paced_answer import Truth
from benchmarks.common.table import print_rows, write
from benchmarks.common.truth import Seen, paced_server, usable_cores
from benchmarks.load.peers.tools import TOOLS, Asked, ToolError, add_arguments, make_tokenizer

KS_95 = 1.358
"""Of Kolmogorov: by chance the distance times the root of the number stays below this 95 times in 100."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One run: what the server saw of it, and what the tool told."""

    arrived_ns: list[int]
    told: list[Seen]
    truths: dict[str, Truth]
    server: dict[str, Any]
    doubt: dict[str, str]


def run(name: str, options: argparse.Namespace, directory: Path) -> Sent | str:
    """Or why it failed."""
    tool = TOOLS[name]
    with paced_server(directory, ("--tick-ms", str(options.tick_ms))) as server:
        asked = Asked(
            url=server.url,
            directory=directory,
            tokenizer=options.tokenizer,
            num_prompts=round(options.rate * options.duration_s),
            rate_per_s=options.rate,
            output_len=options.output_len,
            seed=options.seed,
            workers=options.workers,
        )
        cost = tool.run(asked, usable_cores()[1], timeout_s=options.timeout_s, is_watched=False)
    if cost.failure:
        return cost.failure
    try:
        told = next(iter(tool.told(directory).values()))
    except ToolError as error:
        return str(error)
    truths = {label: truth for truth in server.requests() for label in (truth.prompt_digest, truth.request_id)}
    known = {id(truths[seen.request_id]): truths[seen.request_id] for seen in told if seen.request_id in truths}
    return Sent(sorted(truth.arrived_ns for truth in known.values()), told, truths, server.stats, tool.doubt(cost))


def gaps_s(arrived_ns: Sequence[int]) -> list[float]:
    return [(later - earlier) / 1e9 for earlier, later in pairwise(arrived_ns)]


def ks_distance(gaps: Sequence[float], rate_per_s: float) -> float:
    """Of the gaps, in seconds, from the exponential distribution of this rate."""
    return float(stats.kstest(gaps, stats.expon(scale=1 / rate_per_s).cdf).statistic)


def lateness_ms(sent: Sent) -> dict[str, Any]:
    """By the tool's records, and by the server's clock; empty where the tool keeps no schedule."""
    planned = [(seen.scheduled_ns, seen) for seen in sent.told if seen.scheduled_ns is not None]
    if not planned:
        return {}
    by_client = [seen.sent_ns - due for due, seen in planned if seen.sent_ns is not None]
    arrived = [
        (due, sent.truths[seen.request_id].arrived_ns) for due, seen in planned if seen.request_id in sent.truths
    ]
    first_due, first_arrived = min(arrived)
    by_server = [(came - first_arrived) - (due - first_due) for due, came in arrived]
    return {**spread_ms("sent late", by_client), **spread_ms("arrived late", by_server)}


def spread_ms(name: str, values_ns: Sequence[int]) -> dict[str, float]:
    sizes = np.abs(values_ns) / 1e6
    shares = {"p50": 50, "p99": 99, "max": 100}
    return {f"{name} {label}": float(np.percentile(sizes, share)) for label, share in shares.items()}


def row(first: Sent, second: Sent, options: argparse.Namespace) -> dict[str, Any]:
    gaps, again = gaps_s(first.arrived_ns), gaps_s(second.arrived_ns)
    both = min(len(gaps), len(again))
    return {
        "requests": len(first.arrived_ns),
        "rate": len(gaps) / sum(gaps),
        "KS distance": ks_distance(gaps, options.rate),
        "seed repeats": float(np.median(np.abs(np.subtract(gaps[:both], again[:both])))) * 1e3,
        **lateness_ms(first),
        **first.doubt,
    }


def measure(name: str, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    tool = TOOLS[name]
    if not tool.is_installed:
        return {"tool": tool.name, "failed": "not installed"}
    runs = []
    for index in range(2):
        found = run(name, options, root / f"{name}-{index}")
        if isinstance(found, str):
            return {"tool": tool.name, "failed": found}
        runs.append(found)
    servers = [sent.server for sent in runs]
    return {"tool": tool.name, **row(runs[0], runs[1], options), "servers": servers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["benchctl", "vllm", "guidellm", "aiperf"])
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--duration-s", type=float, default=30.0)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--tick-ms", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    num_gaps = round(options.rate * options.duration_s) - 1
    with tempfile.TemporaryDirectory() as root:
        options.tokenizer = make_tokenizer(Path(root) / "tokenizer")
        rows = [measure(name, options, Path(root)) for name in options.tools]
    title = f"Poisson arrivals, {options.rate:g} requests/s for {options.duration_s:g} s; times in ms"
    print_rows(title, rows, hidden=("servers",))
    print(f"KS distance by chance: below {KS_95 / math.sqrt(num_gaps):.4f} in 95 of 100 series")
    write(options.json, rows)


if __name__ == "__main__":
    main()
