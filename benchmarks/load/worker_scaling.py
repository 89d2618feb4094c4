"""What splitting a load over several processes gains: tokens per second that 1, 2, … workers could take in.

Each count of workers takes in the same streams of the paced server, which has a core of its own. What they *could*
take in follows from what they needed: tokens per second over the cores that the busiest of their processes kept
busy. The process that gathers the records of the workers counts as one of them. That figure presumes a core for
each process; the tokens per second seen are those of the cores there are, and a column says what held them back.

It is cautious at a low pace: a process that is woken for few tokens at a time pays more for each, and two are woken
for fewer than one. The more the server can send, the closer the figure comes to what full processes do.

    python -m benchmarks.load.worker_scaling [--workers 1 2] [--streams 256] [--tick-ms 8] [--seconds 8]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchctl.load.client import StreamClient
from benchctl.load.process import allow_many_open_files, steady_interpreter
from benchctl.load.schedule import Load
from benchctl.load.workers import WorkerLoad, WorkerPlan
from benchctl.profile.arrival import Arrival
from benchctl.profile.sections import Timeouts
from benchctl.records.record import Call, PreparedRequest
from benchctl.records.schema import ClientSample
from benchmarks.common.table import show, write
from benchmarks.common.truth import PacedRun, paced_server, usable_cores

FULL = 0.95
"""Of a core, from which on it counts as what held the tokens back."""


def call(index: int, num_tokens: int) -> Call:
    """A completion of the paced server's dialect."""
    body = {"model": "paced", "prompt": f"Stream {index}.", "max_tokens": num_tokens, "stream": True}
    request = PreparedRequest(
        request_id=f"r{index}",
        index=index,
        arrival_ns=0,
        prompt_tokens=3,
        max_tokens=num_tokens,
        seed=index,
        source="bench",
    )
    return Call(
        request=request,
        path="/v1/completions",
        headers={"x-request-id": request.request_id},
        body=msgspec.json.encode(body | {"ignore_eos": True, "stream_options": {"include_usage": True}}),
    )


class Watch:
    """Processor time of the processes of a load between the first of their samples and the last."""

    def __init__(self) -> None:
        self.samples: dict[int, list[ClientSample]] = {}
        self.gathering: list[tuple[int, int]] = []

    def take(self, sample: ClientSample) -> None:
        self.samples.setdefault(sample.worker, []).append(sample)
        self.gathering.append((time.monotonic_ns(), time.process_time_ns()))

    def worker_cores(self) -> list[float]:
        return [
            (own[-1].cpu_ns - own[0].cpu_ns) / (own[-1].t_ns - own[0].t_ns)
            for _, own in sorted(self.samples.items())
        ]

    def gathering_cores(self) -> float:
        (start_ns, before_ns), (end_ns, after_ns) = self.gathering[0], self.gathering[-1]
        return (after_ns - before_ns) / (end_ns - start_ns)


async def take_in(server: PacedRun, count: int, streams: int, tokens: int) -> tuple[Watch, float, int]:
    """What the processes needed, the seconds from the first send to the last token, and the failures."""
    watch, arrival = Watch(), Arrival(kind="burst")
    calls = (call(i, tokens) for i in range(streams))
    async with StreamClient(server.url, Timeouts()) as client:
        load: Load | WorkerLoad = Load(client, arrival, lambda _record: None, on_sample=watch.take)
        if count > 1:
            plan = WorkerPlan(base_url=server.url, timeouts=Timeouts(), arrival=arrival, count=count)
            load = WorkerLoad(plan, lambda _record: None, watch.take)
        with steady_interpreter():
            await load.drive(calls)
    ended = load.summary()
    assert ended.last_token_ns is not None
    assert ended.first_send_ns is not None
    return watch, (ended.last_token_ns - ended.first_send_ns) / 1e9, ended.num_failed


def measured(count: int, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    tokens = max(2, round(options.seconds * 1000 / options.tick_ms))
    all_cores, own_cores = os.sched_getaffinity(0), usable_cores()[1]
    with paced_server(directory, ("--tick-ms", str(options.tick_ms), "--phase", options.phase)) as server:
        os.sched_setaffinity(0, own_cores)
        watch, wall_s, num_failed = uvloop.run(take_in(server, count, options.streams, tokens))
    os.sched_setaffinity(0, all_cores)
    workers, seen_per_s = watch.worker_cores(), options.streams * tokens / wall_s
    gathering = watch.gathering_cores() if count > 1 else 0.0
    load_cores = sum(workers) + gathering
    return {
        "workers": count,
        "tokens/s seen": seen_per_s,
        "cores by worker": " + ".join(f"{cores:.2f}" for cores in workers),
        "gathering": gathering,
        "us per token": 1e6 * load_cores / seen_per_s,
        "tokens/s possible": seen_per_s / max(*workers, gathering),
        "failed": num_failed,
        "held back by": held_back(load_cores, server.stats, wall_s),
    }


def held_back(load_cores: float, stats: dict[str, Any], wall_s: float) -> str:
    """What kept more tokens from being seen."""
    num_cores = len(usable_cores()[1])
    if stats["cpu_s"] / wall_s > FULL or stats["missed_ticks"]:
        return f"the server ({stats['missed_ticks']} of its ticks left out)"
    if load_cores > FULL * num_cores:
        return f"the cores of the load ({num_cores})"
    return "the pace asked for"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tick-ms", type=float, default=8.0, help="between the tokens of a stream")
    parser.add_argument("--phase", choices=("common", "spread"), default="spread")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load, at the pace asked for")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    allow_many_open_files()
    rows = []
    for count in options.workers:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(measured(count, options, Path(directory)))
    for row in rows:
        row["gain"] = row["tokens/s possible"] / rows[0]["tokens/s possible"]
    show(rows)
    write(options.json, rows)


if __name__ == "__main__":
    main()
