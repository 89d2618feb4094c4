"""Load generators beside each other and beside the least that Python can do, on a server whose truth is known.

    python -m benchmarks.load.clients [--sections slots cost ...] [--tools limit benchctl vllm ...]

Each tool sends the same load to a fresh paced server, which writes down the kernel's stamp of each arrival and the
moment of each send; the tools take turns, and ratios are to the first of them. Sections:

    slots       a closed loop whose answers of one wave end together. From the server's log: requests open on
                average, tokens per second, the gap from the end of an answer until the request that took its slot
                arrived, and idle slots. Beside them the processor time for each token, start and end of the command
                included, the errors of TTFT and ITL, and what benchctl says of its own slots and of its run
    busy        the same beside two processes that compute without end; ``lengths``: with short and long answers;
                ``coalescing``: four events in each send; ``delayed``: benchctl is held up by 80 ms before each
                request that fills a slot, and each run has to be suspect
    whole       processor time of a token over the whole command, and less that of a command that asks for one
                token; the most memory of its process; answers of equal and of random lengths
    dropped     the first section beside a server that closes three connections of ten behind their answers
    cost        processor time of a token: a run with long answers less one with short ones, over the tokens more
    smallest    wall time, processor time and memory of one request of one token
    accuracy    what a tool says less what was, without its sign, in ms: TTFT, gaps between events (ITL), TPOT.
                *bound* is the share of events whose time benchctl itself calls an upper bound, *loop* what its
                errors would be by when its event loop read
    schedule    Poisson arrivals: how late it sent by its own records and by the server's stamps, the Kolmogorov
                distance of the gaps from the exponential law (in 95 of 100 series it is *by chance* below that),
                and the median difference of the gaps of two runs with one seed

``--scale`` multiplies streams and requests. A dash: the tool does not tell this. The server has a core of its own.
"""

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from scipy import stats

from benchctl.analysis.metrics.chunks import chunks_of
from benchctl.analysis.metrics.client import client_metrics
from benchctl.analysis.metrics.latency import measured
from benchctl.profile.load import parse_profile
from benchctl.records.loaded import load_results
from benchmarks.common.busy import running
from benchmarks.common.harness import FailedError, Figures, compared, options, write
from benchmarks.common.measured_process import Cost
from benchmarks.common.paced_server import Truth
from benchmarks.common.truth import PacedRun, Seen, errors, on_cores, paced_server, usable_cores
from benchmarks.load.peers.tools import TOOLS, Load, make_tokenizer, seen_by_benchctl

SHARES = {"p50": 50, "p99": 99, "max": 100}
SHORT, LONG = 50, 1050
"""Tokens of the answers whose difference gives the cost of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is sent and what the server does; ``waves`` are the requests of each stream."""

    streams: int = 64
    waves: int = 1
    output_len: int = 128
    tick_ms: float = 20.0
    rate_per_s: float | None = None
    flags: tuple[str, ...] = ()
    is_random: bool = False
    """Lengths of answers are random, up to twice ``output_len``."""
    workers: str | None = None
    """Processes of the client, in place of the option."""
    num_busy: int = 0
    """Processes beside the load that compute without end."""
    is_core_shared: bool = False
    """The tool has one core, which it shares with these processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A tool that has sent its load, and the server that has stopped."""

    case: Case
    load: Load
    cost: Cost
    server: PacedRun
    truths: Sequence[Truth]
    """Of the complete requests."""
    seen: Sequence[Seen]


class Bench:
    """Runs tools against fresh servers, each in a directory of its own."""

    def __init__(self, root: Path, scale: float, workers: str, timeout_s: float) -> None:
        self.root, self.scale, self.workers, self.timeout_s = root, scale, workers, timeout_s
        self.tokenizer, self.numbers = make_tokenizer(root / "tokenizer"), count()

    def run(self, tool: str, case: Case, *, is_watched: bool = False, keeps_reads: bool = False) -> Run:
        """Raises FailedError when the tool did, or did not have all of its answers."""
        directory = self.root / str(next(self.numbers))
        streams = max(1, round(case.streams * self.scale))
        cores = usable_cores()[1][: 1 if case.is_core_shared else None]
        with (
            paced_server(directory, ("--tick-ms", str(case.tick_ms), *case.flags)) as server,
            busy_loops(case.num_busy, cores if case.is_core_shared else None),
        ):
            num_prompts = streams * case.waves
            prompts = write_prompts(directory, num_prompts, case.output_len) if case.is_random else None
            load = Load(
                url=server.url,
                directory=directory,
                tokenizer=self.tokenizer,
                num_prompts=num_prompts,
                prompts=prompts,
                concurrency=None if case.rate_per_s else streams,
                rate_per_s=case.rate_per_s,
                output_len=case.output_len,
                workers=case.workers or self.workers,
                keeps_reads=keeps_reads,
            )
            cost = TOOLS[tool].run(load, cores, timeout_s=self.timeout_s, is_watched=is_watched)
        if cost.failure or server.stats["tokens"] < (0 if prompts else load.num_prompts * load.output_len):
            raise FailedError(cost.failure or f"only {server.stats['tokens']} tokens were streamed")
        truths = [truth for truth in server.requests() if truth.is_complete][-load.num_prompts :]
        seen = TOOLS[tool].seen(directory)
        return Run(case=case, load=load, cost=cost, server=server, truths=truths, seen=seen)


def write_prompts(directory: Path, count: int, mean_len: int) -> Path:
    """Rows whose answers have random lengths of that mean."""
    file, draw = directory / "prompts.jsonl", Random(1)
    rows = [{"prompt": f"w{i} " * 16, "output_len": draw.randint(1, 2 * mean_len - 1)} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def busy_loops(number: int, cores: Sequence[int] | None) -> AbstractContextManager[None]:
    """Processes that take all they get, of these cores or of all."""
    argv = [sys.executable, "-c", "while True: pass"]
    return running([argv if cores is None else on_cores(argv, cores)] * number)


def spread_ms(name: str, values_ns: Sequence[float], shares: Sequence[str] = tuple(SHARES)) -> dict[str, Any]:
    """Percentiles of the sizes in ms."""
    sizes = np.abs(values_ns) / 1e6
    return {
        f"{name} {label}": float(np.percentile(sizes, SHARES[label])) if len(sizes) else None for label in shares
    }


def slots(bench: Bench, tool: str, case: Case) -> Figures:
    """From the first arrival to the last: after that there is no request left for a slot."""
    run = bench.run(tool, case)
    arrivals = sorted(truth.arrived_ns for truth in run.truths)
    ends = sorted(truth.sends_ns[-1] for truth in run.truths)
    start, end = arrivals[0], arrivals[-1]
    gaps = [arrival - freed for freed, arrival in zip(ends, arrivals[run.load.concurrency :], strict=False)]
    open_ns = sum(min(truth.sends_ns[-1], end) - truth.arrived_ns for truth in run.truths)
    wrong = errors(run.seen, run.truths)
    return {
        "open": open_ns / (end - start) if end > start else float(len(run.truths)),
        "tok/s": run.server.stats["tokens"] / ((ends[-1] - start) / 1e9),
        "gap ms": statistics.fmean(gaps) / 1e6 if gaps else None,
        "idle": sum(gaps) / (run.load.concurrency * (end - start)) if end > start else 0.0,
        "us/token": 1e6 * run.cost.cpu_s / run.server.stats["tokens"],
        **spread_ms("ttft err", wrong.ttft_ns, ["p99"]),
        **spread_ms("itl err", wrong.itl_ns, ["p99"]),
        **(own_words(run.load.directory / "benchctl") if tool.startswith("benchctl") else {}),
    }


def own_words(results: Path) -> dict[str, Any]:
    """What benchctl says of its own run: the share of idle slots, and its state with what is behind it."""
    read = load_results(results)
    (loaded,) = read.runs
    arrival = parse_profile(read.profile_yaml, str(results)).workload.arrival
    idle = client_metrics(chunks_of(measured(loaded.requests)), loaded.client, arrival)["slot_idle_frac"]
    codes = sorted({warning.code for warning in loaded.record.warnings})
    return {"says idle": idle, "by itself": " ".join([loaded.record.state, *codes])}


def whole(bench: Bench, tool: str, case: Case) -> Figures:
    """Of the whole command, and less a command that asks for one token."""
    run = bench.run(tool, case)
    start_s = bench.run(tool, replace(case, streams=1, waves=1, output_len=1, is_random=False)).cost.cpu_s
    tokens = run.server.stats["tokens"]
    return {
        "us/token": 1e6 * run.cost.cpu_s / tokens,
        "less start": 1e6 * (run.cost.cpu_s - start_s) / tokens,
        "start s": start_s,
        "tok/s": tokens / ((max(one.sends_ns[-1] for one in run.truths) - run.truths[0].arrived_ns) / 1e9),
        "peak MB": run.cost.peak_bytes / 1e6,
    }


def cost(bench: Bench, tool: str, case: Case) -> Figures:
    short, long = (bench.run(tool, replace(case, output_len=tokens), is_watched=True) for tokens in (SHORT, LONG))
    tokens = long.server.stats["tokens"] - short.server.stats["tokens"]
    spent_s = long.cost.cpu_s - short.cost.cpu_s
    if spent_s <= 0:
        raise FailedError("starting varies by more than the tokens cost: more streams or rounds would tell")
    peak_mb, processes = long.cost.peak_bytes / 1e6, long.cost.most_processes
    return {"us/token": 1e6 * spent_s / tokens, "peak MB": peak_mb, "processes": processes}


def smallest(bench: Bench, tool: str, case: Case) -> Figures:
    spent = bench.run(tool, case).cost
    return {"wall s": spent.wall_s, "CPU s": spent.cpu_s, "peak MB": spent.peak_bytes / 1e6}


def accuracy(bench: Bench, tool: str, case: Case) -> Figures:
    """Counts are of requests: those known to both, with another number of tokens, whose gaps are not told."""
    run = bench.run(tool, case, keeps_reads=True)
    wrong = errors(run.seen, run.truths)
    figures = {"matched": f"{wrong.num_matched}/{run.load.num_prompts}", "wrong tokens": wrong.num_wrong_tokens}
    for name in ("ttft", "itl", "tpot"):
        figures |= spread_ms(name, getattr(wrong, f"{name}_ns"))
    figures |= {"no gaps": wrong.num_itl_missing, "bound": wrong.bound_share}
    if tool == "benchctl":
        by_loop = errors(seen_by_benchctl(run.load.directory, by_loop=True), run.truths)
        figures |= spread_ms("loop ttft", by_loop.ttft_ns, ["p99"]) | spread_ms("loop itl", by_loop.itl_ns, ["p99"])
    return figures


def schedule(bench: Bench, tool: str, case: Case) -> Figures:
    first, second = bench.run(tool, case), bench.run(tool, case)
    gaps, again = gaps_s(first), gaps_s(second)
    both = min(len(gaps), len(again))
    truths = {name: truth for truth in first.truths for name in (truth.prompt_digest, truth.request_id)}
    planned = [seen for seen in first.seen if seen.scheduled_ns is not None and seen.request_id in truths]
    arrived = sorted((seen.scheduled_ns, truths[seen.request_id].arrived_ns) for seen in planned)
    late = [(came - arrived[0][1]) - (due - arrived[0][0]) for due, came in arrived]
    return {
        "requests": len(first.truths),
        "rate": len(gaps) / sum(gaps),
        "KS distance": ks_distance(gaps, case.rate_per_s),
        "by chance": 1.358 / math.sqrt(len(gaps)),
        "seed repeats ms": float(np.median(np.abs(np.subtract(gaps[:both], again[:both])))) * 1e3,
        **spread_ms("sent late", [seen.sent_ns - seen.scheduled_ns for seen in planned]),
        **spread_ms("arrived late", late),
    }


def gaps_s(run: Run) -> list[float]:
    return [(b - a) / 1e9 for a, b in pairwise(sorted(truth.arrived_ns for truth in run.truths))]


def ks_distance(gaps: Sequence[float], rate_per_s: float) -> float:
    """Of gaps in seconds from the exponential distribution of this rate."""
    return float(stats.kstest(gaps, stats.expon(scale=1 / rate_per_s).cdf).statistic)


def closed_loops(lengths: Sequence[int] = (128,), waves: int = 10, **more: Any) -> dict[str, Case]:
    sizes = ((64, 20.0), (256, 20.0), (256, 10.0), (800, 66.0))
    return {
        f"{streams} streams, {tick_ms:g} ms per token, {tokens} tokens per answer": Case(
            streams=streams, tick_ms=tick_ms, output_len=tokens, waves=waves, **more
        )
        for streams, tick_ms in sizes
        for tokens in lengths
    }


SECTIONS: Mapping[str, tuple[Callable[[Bench, str, Case], Figures], dict[str, Case]]] = {
    "slots": (slots, closed_loops()),
    "busy": (slots, closed_loops(num_busy=2)),
    "lengths": (slots, closed_loops((32, 128, 1000), waves=3)),
    "coalescing": (slots, {"64 streams, 4 events in each send": Case(waves=8, flags=("--coalesce", "4"))}),
    "delayed": (slots, closed_loops(waves=4)),
    "whole": (
        whole,
        {
            f"{streams} streams, {'random' if is_random else 'equal'} lengths": Case(
                streams=streams,
                tick_ms=66.0 if streams > 256 else 20.0,
                waves=2 if streams > 256 else 6,
                is_random=is_random,
            )
            for streams in (64, 256, 800)
            for is_random in (False, True)
        },
    ),
    "dropped": (
        slots,
        {"64 streams, 30 % of connections closed": Case(waves=20, output_len=32, flags=("--close-frac", "0.3"))},
    ),
    "cost": (
        cost,
        {
            f"{streams} streams, {phase} phase": Case(streams=streams, flags=("--phase", phase))
            for phase in ("common", "spread")
            for streams in (64, 256)
        },
    ),
    "smallest": (smallest, {"1 request of 1 token": Case(streams=1, output_len=1)}),
    "accuracy": (
        accuracy,
        {
            "64 streams": Case(output_len=200),
            "64 streams, the tool's only core busy": Case(output_len=200, num_busy=1, is_core_shared=True),
            "256 streams started at once": Case(streams=256, output_len=200),
            "64 streams, 4 tokens in each event": Case(output_len=200, flags=("--tokens-per-chunk", "4")),
            "64 streams, 4 events in each send": Case(output_len=200, flags=("--coalesce", "4")),
            "64 streams, four workers": Case(output_len=200, workers="4"),
        },
    ),
    "schedule": (schedule, {"Poisson, 200/s for 30 s": Case(streams=6000, rate_per_s=200.0, output_len=8)}),
}
RATIOS = ("tok/s", "gap ms", "us/token", "less start", "CPU s")


def main() -> None:
    asked = options(
        __doc__,
        sections=["slots", "cost", "smallest", "accuracy", "schedule"],
        tools=["limit", "benchctl", "vllm", "guidellm", "aiperf"],
        rounds=1,
        scale=1.0,
        workers="1",
        timeout_s=300.0,
    )
    os.environ.setdefault("BENCH_REFILL_DELAY_MS", "80")
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root), asked.scale, asked.workers, asked.timeout_s)
        for section in asked.sections:
            figures, cases = SECTIONS[section]
            tools = ["benchctl-delayed"] if section == "delayed" else asked.tools
            for title, case in cases.items():
                ways = {tool: partial(figures, bench, tool, case) for tool in tools}
                name = f"{section}: {title}"
                tables[name] = compared(name, ways, rounds=asked.rounds, ratios=RATIOS)
    write(asked.json, tables)


if __name__ == "__main__":
    main()
