"""A vLLM with one thread that stays for many loads, on cores that may change, and the process that loads it."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Final

import httpx
import psutil

from benchctl.engines.engine import LaunchSite
from benchctl.engines.vllm import VllmEngine
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.schema import StepRecord
from benchmarks.common.fresh_server import fresh_server

CONCURRENCY: Final = 12
OUTPUT_TOKENS: Final = 96
Window = tuple[int, int]
"""First send and last answer of a load, in ns of the monotonic clock, on which the engine stamps its steps."""


def send(url: str, model: str, waves: int, cores: Sequence[int], begin_ns: int) -> Window:
    """One load from this process, which moves to ``cores``; it begins at ``begin_ns``."""
    os.sched_setaffinity(0, cores)
    body = {"model": model, "prompt": "one two three " * 20, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}

    async def slot(client: httpx.AsyncClient) -> None:
        for _ in range(waves):
            (await client.post("/v1/completions", json=body)).raise_for_status()

    async def load() -> Window:
        async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
            await asyncio.sleep(max(begin_ns - time.monotonic_ns(), 0) / 1e9)
            start_ns = time.monotonic_ns()
            await asyncio.gather(*(slot(client) for _ in range(CONCURRENCY)))
            return start_ns, time.monotonic_ns()

    return asyncio.run(load())


@dataclass(frozen=True, slots=True)
class PinnedServer:
    """A server, and the process that is its client."""

    port: int
    model: str
    directory: Path
    client: ProcessPoolExecutor

    def move(self, cores: Sequence[int]) -> None:
        """Bind every thread of the server to ``cores``."""
        for root in psutil.Process().children():
            if str(self.port) in root.cmdline():
                for process in (root, *root.children(recursive=True)):
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, cores)

    def steps(self) -> list[StepRecord]:
        """All steps until now, in their order."""
        return list(VllmEngine().read_steps(self.directory))


def load_together(servers: Sequence[PinnedServer], cores: Sequence[Sequence[int]], waves: int) -> list[Window]:
    """One load of each of these servers at the same time, each client on its cores."""
    begin_ns = time.monotonic_ns() + 100_000_000
    futures = [
        server.client.submit(send, f"http://127.0.0.1:{server.port}", server.model, waves, own, begin_ns)
        for server, own in zip(servers, cores, strict=True)
    ]
    return [future.result() for future in futures]


def mean_step_ns(steps: Sequence[StepRecord], window: Window) -> float:
    """Mean duration of the steps that lie in ``window``."""
    start_ns, end_ns = window
    return fmean(
        step.dur_ns for step in steps if start_ns <= step.start_ns and step.start_ns + step.dur_ns <= end_ns
    )


@contextmanager
def pinned_vllm(
    model: str, core: int, port: int, directory: Path, overrides: Sequence[str] = ()
) -> Iterator[PinnedServer]:
    """A server of the preset vllm-cpu that starts on ``core``, where vLLM computes with one thread."""
    directory.mkdir()
    engine = VllmEngine()
    profile = load_profile("aa", engine="vllm-cpu", overrides=(f"model={model}", *overrides))
    settings, site = variant_settings(profile, profile.baseline, {}), LaunchSite(port=port, directory=directory)
    everywhere = os.sched_getaffinity(0)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client:
        os.sched_setaffinity(0, {core})
        try:
            server = fresh_server(engine, profile, settings, site, {**os.environ, **engine.env(settings, site)})
            server.__enter__()
        finally:
            os.sched_setaffinity(0, everywhere)
        try:
            yield PinnedServer(port, settings.model, directory, client)
        finally:
            server.__exit__(None, None, None)
