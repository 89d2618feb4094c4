"""How many streamed tokens one client process takes in, and what a token costs it.

Streams the same requests of the simulator through benchctl's client and then through a bare protocol that only
counts bytes, and prints both. The bare one is the
limit: no Python client on this event loop receives the same streams for less.

Two cases: the server sends as fast as it can, so that a read holds many events; and it sends one event per step
and stream, as real servers do, so that every token costs a wake-up.

    python scripts/bench/client_throughput.py [--streams 64] [--tokens 500] [--requests 256]
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import uvloop

from benchctl.engines.engine import LaunchSite, RequestCall
from benchctl.engines.sim import SimEngine
from benchctl.load.client import StreamClient
from benchctl.load.driver import Load
from benchctl.load.exchange import Call
from benchctl.load.interpreter import steady_interpreter
from benchctl.measure.port import HOST, choose_port
from benchctl.measure.server import Launch, ServerProcess
from benchctl.profile.engine_options import SimOptions
from benchctl.profile.model import Arrival, Sampling, Timeouts, VariantSettings
from benchctl.records.run import PreparedRequest

CASES = {"many events per read": 1e6, "one event per read": 0.1}
"""Time scales of the simulator: one at which only machinery limits it, one at which it waits between steps."""


def settings(time_scale: float) -> VariantSettings:
    return VariantSettings(
        variant="baseline",
        model="qwen2.5-0.5b",
        server=SimOptions(cost_model="roofline", time_scale=time_scale),
        sampling=Sampling(),
        guidance=None,
    )


def prepared(count: int, tokens: int) -> list[PreparedRequest]:
    return [
        PreparedRequest(
            request_id=f"r{i}",
            index=i,
            arrival_ns=0,
            prompt=f"Count from {i}.",
            prompt_tokens=4,
            max_tokens=tokens,
            ignore_eos=True,
            seed=i,
            source=f"generated:{i}",
        )
        for i in range(count)
    ]


class ByteCounter(asyncio.Protocol):
    """Sends one request and counts what comes back until the connection closes."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_bytes = 0
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self.content)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self.closed.set_result(None)


async def count_bytes(port: int, calls: list[RequestCall], streams: int) -> int:
    slots, loop = asyncio.Semaphore(streams), asyncio.get_running_loop()

    async def one(call: RequestCall) -> int:
        head = (
            f"POST {call.path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        content = f"{head}Content-Length: {len(call.body)}\r\n\r\n".encode() + call.body
        async with slots:
            _, counter = await loop.create_connection(lambda: ByteCounter(content), HOST, port)
            await counter.closed
        return counter.num_bytes

    return sum(await asyncio.gather(*(one(call) for call in calls)))


async def stream(
    client: StreamClient, requests: list[PreparedRequest], asked: list[RequestCall], streams: int
) -> None:
    pairs = zip(requests, asked, strict=True)
    calls = [Call(request=request, path=call.path, headers=call.headers, body=call.body) for request, call in pairs]
    load = Load(client, Arrival(kind="closed-loop", max_concurrency=streams), lambda _record: None)
    await load.drive(calls)
    if load.summary().num_failed:
        raise SystemExit(f"{load.summary().num_failed} of {len(requests)} requests failed")


async def timed(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Wall and CPU seconds of ``work``."""
    with steady_interpreter():
        wall, cpu = time.perf_counter(), time.process_time()
        await work()
        return time.perf_counter() - wall, time.process_time() - cpu


def show(name: str, num_tokens: int, wall_s: float, cpu_s: float) -> None:
    print(
        f"{name:<10} {num_tokens / wall_s:>10,.0f} tokens/s   {1e6 * cpu_s / num_tokens:>6.2f} us CPU per token   "
        f"{num_tokens / cpu_s:>10,.0f} tokens/s on one full core"
    )


async def compare(options: argparse.Namespace, how: VariantSettings, directory: Path) -> None:
    engine, port, streams = SimEngine(), choose_port(None), options.streams
    requests = prepared(options.requests, options.tokens)
    asked = [engine.request_call(request, how) for request in requests]
    launch = Launch(
        argv=engine.argv(how, LaunchSite(port=port, directory=directory)),
        env=dict(os.environ),
        port=port,
        health_path=engine.health_path(how),
        log=directory / "server.log",
        timeouts=Timeouts(),
        diagnose=engine.diagnose,
    )
    num_tokens = options.requests * options.tokens
    with ServerProcess(launch) as server:
        async with StreamClient(launch.base_url, launch.timeouts) as client:
            await server.wait_ready(client.control)
            await stream(client, requests[:streams], asked[:streams], streams)  # warm-up of both sides
            ours = await timed(lambda: stream(client, requests, asked, streams))
        limit = await timed(lambda: count_bytes(port, asked, streams))
    show("benchctl", num_tokens, *ours)
    show("limit", num_tokens, *limit)
    print(f"ratio to the limit: wall {ours[0] / limit[0]:.2f}, CPU {ours[1] / limit[1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--requests", type=int, default=256)
    options = parser.parse_args()
    for name, time_scale in CASES.items():
        print(name)
        with tempfile.TemporaryDirectory() as directory:
            uvloop.run(compare(options, settings(time_scale), Path(directory)))


if __name__ == "__main__":
    main()
