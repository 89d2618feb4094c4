"""What priority gives a load client on a busy machine: how late requests leave, and how late tokens are read.

Each row is one open loop (Poisson) against the paced server, with processes beside it that compute without end,
each in a session of its own as a server is. ``sent late`` is by how much later than planned a request left; ``read
late`` by how much later than the kernel had them chunks were read. Neither depends on how the server fared.

    python -m benchmarks.load.client_priority [--rate 100] [--seconds 10] [--busy 4]
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchctl.load.client import StreamClient
from benchctl.load.process import load_priority, steady_interpreter
from benchctl.load.schedule import Load
from benchctl.profile.arrival import Arrival
from benchctl.profile.sections import PriorityOption, Timeouts
from benchctl.records.record import Call, RequestRecord
from benchmarks.common.table import show, write
from benchmarks.common.truth import paced_server, usable_cores
from benchmarks.load.worker_scaling import call

MANY = 1_000_000
"""Processes of a load that are too many for real-time scheduling on any machine."""
ASKED: dict[str, tuple[PriorityOption, int]] = {"normal": ("none", 1), "nice": ("auto", MANY), "fifo": ("auto", 1)}
NS_PER_MS = 1e6


@contextmanager
def busy(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def planned_calls(rate: float, seconds: float, tokens: int) -> list[Call]:
    draw, at_s, calls = random.Random(7), 0.0, []
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        one = call(len(calls), tokens)
        request = msgspec.structs.replace(one.request, arrival_ns=round(at_s * 1e9))
        calls.append(Call(request=request, path=one.path, headers=one.headers, body=one.body))
    return calls


async def driven(url: str, calls: Sequence[Call], level: str) -> tuple[str, list[RequestRecord]]:
    records: list[RequestRecord] = []
    option, num_processes = ASKED[level]
    arrival = Arrival(kind="trace")
    async with StreamClient(url, Timeouts()) as client:
        with steady_interpreter(), load_priority(option, num_processes) as got:
            await Load(client, arrival, records.append).drive(calls)
            await asyncio.sleep(0)
    return str(got), records


def measured(level: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    calls = planned_calls(options.rate, options.seconds, options.tokens)
    with paced_server(directory, ("--tick-ms", "10")) as server, busy(options.busy):
        got, records = uvloop.run(driven(server.url, calls, level))
    sent = [(r.sent_ns - r.scheduled_ns) / NS_PER_MS for r in records if r.sent_ns is not None]
    read = [late / NS_PER_MS for r in records for choice in r.choices for late in choice.chunk_late_ns or ()]
    return {
        "asked for": level,
        "got": got.partition(" (")[0],
        "requests": len(records),
        "failed": sum(r.error is not None for r in records),
        **quantiles("sent late", sent),
        **quantiles("read late", read),
    }


def quantiles(name: str, values_ms: list[float]) -> dict[str, float | None]:
    ordered = sorted(values_ms)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        f"{name} {share}": ordered[min(len(ordered) - 1, int(of * len(ordered)))] if ordered else None
        for share, of in shares.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", nargs="+", choices=ASKED, default=list(ASKED))
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--busy", type=int, default=2 * sum(map(len, usable_cores())), help="processes beside it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for level in options.levels:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(measured(level, options, Path(directory)))
    print(f"Poisson arrivals, {options.rate:g} requests/s, {options.busy} busy processes; times in ms")
    show(rows)
    write(options.json, rows)


if __name__ == "__main__":
    main()
