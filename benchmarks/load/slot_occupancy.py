"""Does a closed loop keep its slots full? Measured at the server, for each load generator in the same call.

Each tool drives N streams against the paced server, whose answers of one wave end together: then N slots become
free within one tick, and the server waits for N requests. From its own log come the requests that were open at it
on average, the gap from the end of an answer until the request that took its slot arrived (in a closed loop the
i-th end makes room for the arrival N + i), and tokens per second. From the tool come its errors of TTFT and ITL,
what it says of its own slots, and the processor time of all its processes for each token, its start and its end
included.

    python -m benchmarks.load.slot_occupancy [--cases 64x20 256x20 256x10 800x66] [--output-len 128] [--waves 10]
        [--busy 2] [--repeats 1] [--tools limit benchctl vllm]

A case is STREAMSxTICK_MS. ``--busy`` starts so many processes that compute without end beside the load. The tool
``benchctl-delayed`` holds benchctl's client up by ``--client-delay-ms`` before each request that fills a slot: the
failure that its guard is to find.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchctl.analysis.metrics.client import client_metrics
from benchctl.analysis.metrics.latency import measured
from benchctl.profile.load import parse_profile
from benchctl.records.loaded import load_results
from benchmarks.common.measured_process import Cost
from benchmarks.common.paced_answer import Truth
from benchmarks.common.table import print_rows, write
from benchmarks.common.truth import Errors, errors, paced_server, usable_cores
from benchmarks.load.peers.tools import TOOLS, Asked, add_arguments, make_tokenizer

NS_PER_MS = 1e6
BUSY = "while True: pass"
HARMLESS = {"server-not-fresh"}
"""Said of every load on a server that somebody else started."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full the slots were, by the server's log."""

    mean_open: float
    tokens_per_s: float
    gaps_ns: list[int]
    idle_frac: float

    @property
    def mean_gap_ms(self) -> float | None:
        return statistics.fmean(self.gaps_ns) / NS_PER_MS if self.gaps_ns else None


def occupancy(truths: Sequence[Truth], num_slots: int) -> Occupancy:
    """From the first arrival to the last: after that there is no request left for a slot."""
    arrivals = sorted(truth.arrived_ns for truth in truths)
    ends = sorted(truth.sends_ns[-1] for truth in truths if truth.sends_ns)
    start, end = arrivals[0], arrivals[-1]
    gaps = [arrival - freed for freed, arrival in zip(ends, arrivals[num_slots:], strict=False)]
    open_ns = sum(min(truth.sends_ns[-1], end) - truth.arrived_ns for truth in truths if truth.sends_ns)
    tokens = sum(sum(truth.event_tokens) for truth in truths)
    span_ns = end - start
    return Occupancy(
        mean_open=open_ns / span_ns if span_ns else float(len(truths)),
        tokens_per_s=tokens / ((ends[-1] - start) / 1e9),
        gaps_ns=gaps,
        idle_frac=sum(gaps) / (num_slots * span_ns) if span_ns else 0.0,
    )


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that take every processor that they get."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Bench:
    """Runs the tools in a directory of its own."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options, self.root = options, root
        self.tokenizer = make_tokenizer(root / "tokenizer")
        self.runs: list[dict[str, Any]] = []

    def row(self, name: str, streams: int, tick_ms: float, output_len: int) -> dict[str, Any]:
        """One run of one tool against a fresh server."""
        tool, directory = TOOLS[name], self.root / str(len(self.runs))
        num_prompts = streams * self.options.waves
        flags = ["--tick-ms", f"{tick_ms:g}", "--coalesce", str(self.options.coalesce)]
        flags += ["--closes", self.options.closes] if self.options.closes else []
        with paced_server(directory, flags) as server:
            asked = Asked(
                url=server.url,
                directory=directory,
                tokenizer=self.tokenizer,
                num_prompts=num_prompts,
                concurrency=streams,
                output_len=output_len,
                workers=self.options.workers,
                new_connections=self.options.closes is not None,
            )
            with busy_loops(self.options.busy):
                cost = tool.run(asked, self.cores(), timeout_s=self.options.timeout_s, is_watched=False)
        truths = [truth for truth in server.requests() if truth.is_complete]
        row = {"tool": tool.name, **self.figures(tool.name, cost, truths[-num_prompts:], streams, directory)}
        self.runs.append({"case": f"{streams}x{tick_ms:g}", **row, "server": server.stats})
        return row | (verdict(directory / "benchctl") or tool.doubt(cost))

    def cores(self) -> Sequence[int]:
        return sorted(os.sched_getaffinity(0)) if self.options.all_cores else usable_cores()[1]

    def figures(
        self, name: str, cost: Cost, truths: Sequence[Truth], streams: int, directory: Path
    ) -> dict[str, Any]:
        if cost.failure or not truths:
            return {"failed": cost.failure or "the server saw no request"}
        seen = occupancy(truths, streams)
        tokens = sum(sum(truth.event_tokens) for truth in truths)
        row: dict[str, Any] = {
            "open": seen.mean_open,
            "tok/s": seen.tokens_per_s,
            "gap ms": seen.mean_gap_ms,
            "idle": seen.idle_frac,
            "us/token": 1e6 * cost.cpu_s / tokens,
        }
        told = next(tool for tool in TOOLS.values() if tool.name == name).told(directory)
        found: Errors | None = errors(told[name], truths) if name in told else None
        if found is not None:
            row |= {"ttft err p99": p99_ms(found.ttft_ns), "itl err p99": p99_ms(found.itl_ns)}
        return row


def verdict(results: Path) -> dict[str, Any]:
    """What benchctl says of its own run: the share of idle slots, and its state with what is behind it."""
    if not results.exists():
        return {}
    read = load_results(results)
    loaded = read.runs[0]
    arrival = parse_profile(read.profile_yaml, str(results)).workload.arrival
    told = client_metrics(measured(loaded.requests), loaded.client, arrival)
    codes = sorted({warning.code for warning in loaded.record.warnings} - HARMLESS)
    state = f"{loaded.record.state} ({', '.join(codes)})" if codes else loaded.record.state
    return {"says idle": told["slot_idle_frac"], "by itself": state}


def p99_ms(values_ns: Sequence[float]) -> float | None:
    ordered = sorted(map(abs, values_ns))
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] / NS_PER_MS if ordered else None


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Throughput, gap and cost beside those of the limit of the same call."""
    limit = next((row for row in rows if row["tool"] == TOOLS["limit"].name and "failed" not in row), None)
    if limit is None:
        return rows
    ratios = {"tok/s": "x tok/s", "gap ms": "x gap", "us/token": "x us"}
    return [
        row | {new: row[old] / limit[old] for old, new in ratios.items() if row.get(old) and limit.get(old)}
        for row in rows
    ]


def case(text: str) -> tuple[int, float]:
    streams, _, tick_ms = text.partition("x")
    return int(streams), float(tick_ms)


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    bench = Bench(options, root)
    names = [name for name in options.tools if TOOLS[name].is_installed]
    cases: dict[str, Any] = {}
    beside = f", beside {options.busy} busy loops" if options.busy else ""
    for streams, tick_ms in options.cases:
        for output_len in options.output_len:
            for repeat in range(options.repeats):
                number = f" ({repeat + 1})" if options.repeats > 1 else ""
                title = (
                    f"{streams} streams, {tick_ms:g} ms per token, {output_len} tokens per answer{beside}{number}"
                )
                rows = with_ratios([bench.row(name, streams, tick_ms, output_len) for name in names])
                cases[title] = rows
                print_rows(title, rows)
    return {"cases": cases, "runs": bench.runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["limit", "benchctl", "vllm"])
    parser.add_argument(
        "--cases", nargs="+", type=case, default=[(64, 20.0), (256, 20.0), (256, 10.0), (800, 66.0)]
    )
    parser.add_argument("--output-len", type=int, nargs="+", default=[128])
    parser.add_argument("--waves", type=int, default=10, help="requests of each stream")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute without end beside the load")
    parser.add_argument("--coalesce", type=int, default=1, metavar="K", help="events in one send of the server")
    closes = "the server closes each connection after its answer"
    parser.add_argument("--closes", choices=("said", "silently"), help=closes)
    parser.add_argument("--client-delay-ms", type=float, default=80.0)
    parser.add_argument("--all-cores", action="store_true", help="let the tools use the server's core as well")
    options = parser.parse_args()
    os.environ["BENCH_REFILL_DELAY_MS"] = str(options.client_delay_ms)
    with tempfile.TemporaryDirectory() as root:
        write(options.json, measure(options, Path(root)))


if __name__ == "__main__":
    main()
