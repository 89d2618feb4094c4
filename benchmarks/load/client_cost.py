"""What a streamed token costs each load generator: processor time of the whole tool beside the limit of its loop.

Each tool streams the same load from the paced server (one token every 20 ms and stream), once with short and once
with long answers. All that does not grow with the tokens (start-up, connections, the report) is in both: what is
left, divided by the tokens more, is the cost of a token. Beside it stands the smallest complete run, one request of
one token: how long one waits for an answer to anything.

    python -m benchmarks.load.client_cost [--streams 64 256] [--phases common spread] [--tools limit benchctl ...]

The limits are limit_client.py on two event loops: it stamps and keeps what it reads and understands nothing.
CPU counts all processes of a tool. The server has a core of its own where there are two.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.measured_process import Cost
from benchmarks.common.table import print_rows, write
from benchmarks.common.truth import paced_server, usable_cores
from benchmarks.load.peers.tools import TOOLS, Asked, add_arguments, make_tokenizer

LIMIT = "limit"
UNRESOLVED = (
    "starting varies by more than the tokens cost: longer answers (--output-len) or more --rounds would tell"
)


class Bench:
    """Runs tools in a directory of its own and keeps every figure."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options, self.root = options, root
        self.tokenizer = make_tokenizer(root / "tokenizer")
        self.runs: list[dict[str, Any]] = []

    def cost(self, name: str, phase: str, streams: int, output_len: int) -> Cost:
        """One run against a fresh server."""
        directory = self.root / str(len(self.runs))
        flags = ("--tick-ms", str(self.options.tick_ms), "--phase", phase)
        with paced_server(directory, flags) as server:
            asked = Asked(
                url=server.url,
                directory=directory,
                tokenizer=self.tokenizer,
                num_prompts=streams,
                concurrency=streams,
                output_len=output_len,
                workers=self.options.workers,
            )
            timeout_s = self.options.timeout_s
            found = TOOLS[name].run(asked, usable_cores()[1], timeout_s=timeout_s, is_watched=True)
        if found.failure is None and server.stats["tokens"] < streams * output_len:
            said = f"only {server.stats['tokens']} of {streams * output_len} tokens were streamed"
            found = replace(found, failure=said)
        case = {"tool": name, "phase": phase, "streams": streams, "output_len": output_len}
        self.runs.append({**case, **asdict(found), "server": server.stats})
        return found

    def per_token(self, name: str, phase: str, streams: int) -> dict[str, Any]:
        """Each long run less each short one, per token: the median of these, and their range.

        Processor time of starting varies from run to run; where it swamps that of the tokens, ``failed`` says so
        and there is no cost.
        """
        short, long = self.options.output_len
        lengths = (short, long) * self.options.rounds
        costs = []
        for output_len in lengths:
            costs.append(self.cost(name, phase, streams, output_len))
            if costs[-1].failure:
                return {"tool": TOOLS[name].name, "failed": costs[-1].failure}
        less, more = costs[::2], costs[1::2]
        us = [1e6 * (one.cpu_s - other.cpu_s) / (streams * (long - short)) for one, other in product(more, less)]
        shown = {
            "us/token": statistics.median(us),
            "lowest": min(us),
            "highest": max(us),
            "peak MB": max(cost.peak_bytes for cost in more) / 1e6,
            "processes": max(cost.most_processes for cost in more),
        }
        if min(us) <= 0:
            return {"tool": TOOLS[name].name, **shown, "us/token": None, "failed": UNRESOLVED}
        return {"tool": TOOLS[name].name, **shown}

    def smallest(self, name: str) -> dict[str, Any]:
        costs = [self.cost(name, "common", 1, 1) for _ in range(self.options.rounds)]
        if failure := next((cost.failure for cost in costs if cost.failure), None):
            return {"tool": TOOLS[name].name, "failed": failure}
        return {
            "tool": TOOLS[name].name,
            "wall s": statistics.median(cost.wall_s for cost in costs),
            "CPU s": statistics.median(cost.cpu_s for cost in costs),
            "peak MB": max(cost.peak_bytes for cost in costs) / 1e6,
        }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each cost beside that of the limit, where that was measured."""
    limit = next((row["us/token"] for row in rows if row["tool"] == TOOLS[LIMIT].name), None)
    return [row | ({"x limit": row["us/token"] / limit} if limit and row.get("us/token") else {}) for row in rows]


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    bench = Bench(options, root)
    missing = [{"tool": TOOLS[name].name, "failed": "not installed"} for name in missing_tools(options.tools)]
    names = [name for name in options.tools if TOOLS[name].is_installed]
    cases: dict[str, Any] = {}
    for phase in options.phases:
        for streams in options.streams:
            title = f"{streams} streams, a token every {options.tick_ms:g} ms, {phase} phase"
            cases[title] = with_ratios([bench.per_token(name, phase, streams) for name in names]) + missing
            print_rows(title, cases[title])
    title = "smallest complete run: 1 request, 1 token"
    cases[title] = [bench.smallest(name) for name in names] + missing
    print_rows(title, cases[title])
    print(f"\n{worst_server(bench.runs)}")
    return {"cases": cases, "runs": bench.runs}


def missing_tools(names: list[str]) -> list[str]:
    return [name for name in names if not TOOLS[name].is_installed]


def worst_server(runs: list[Mapping[str, Any]] | list[dict[str, Any]]) -> str:
    """How the server did in the run in which it did worst."""
    worst = max((run["server"] for run in runs), key=lambda stats: stats["missed_ticks"])
    share = worst["missed_ticks"] / max(1, worst["ticks"])
    lag = worst["lag_ms"]
    return (
        f"server at its worst: {share:.2%} of ticks left out, sends late by {lag['p99']} ms (p99), {lag['max']} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, [name for name in TOOLS if name != "limit-stamps"])
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--phases", nargs="+", choices=("common", "spread"), default=["common", "spread"])
    parser.add_argument("--tick-ms", type=float, default=20.0)
    parser.add_argument("--output-len", type=int, nargs=2, default=[50, 1050], metavar=("SHORT", "LONG"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        write(options.json, measure(options, Path(root)))


if __name__ == "__main__":
    main()
