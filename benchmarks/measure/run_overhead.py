"""What benchctl adds to the loads of an experiment: where the wall time of ``benchctl run`` goes, on the simulator.

    python -m benchmarks.measure.run_overhead [--blocks 3] [--rounds 1]

Three experiments as whole commands: eight requests of constant length, as many of random lengths, and the profile
of ``scripts/demo``, whose 36 runs are 6 blocks. Of each the seconds per run by phase, the median of all runs: from
the process of the server until it is ready, until the first request of the load (configuration and warm-up), the
load, until the server is asked to end, and from there to the process of the next: its end, judging, writing.
``beside`` is everything but server start, warm-up and load. ``command`` is the wall time of the whole command,
``x loads`` its ratio to all loads alone, the least that it could take, and ``cpu_s`` the processor time of all its
processes.

The last table is the start of a server beside the least that a process needs for its libraries: an interpreter that
imports the same ones and nothing of benchctl.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.common.harness import FailedError, Figures, compared, options, write

BENCHCTL = [sys.executable, "-m", "benchctl"]
SMALL = """\
seed: 1
engine: {kind: sim, options: {time_scale: 100.0}}
model: qwen2.5-7b
hardware: h100-sxm
stop: %s
workload:
  dataset: generated
  num_prompts: 8
  samples_per_prompt: 4
  output_len: 96
  arrival: {kind: closed-loop, max_concurrency: 8}
  num_warmups: 1
variants:
  baseline: {}
  sampled: {sampling: {top_k: 5}}
"""
LIBRARIES = "import asyncio, uvloop, httptools, pydantic, msgspec, argparse, logging"
MOMENTS = ("launch_ns", "ready_ns", "first_send_ns", "last_token_ns", "stop_ns")
PHASES = ("server", "warm-up", "load", "after load")


def spent(command: list[str]) -> Figures:
    """Wall and processor seconds of a command with all that it starts."""
    before, began_s = os.times(), time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    after = os.times()
    if ended.returncode not in {0, 1, 3}:  # a verdict is none of our business
        raise FailedError(ended.stderr[-300:])
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    return {"command": time.perf_counter() - began_s, "cpu_s": cpu_s}


def experiment(profile: str, blocks: int) -> Figures:
    with tempfile.TemporaryDirectory() as root:
        path, results = Path(root) / "small.yaml", Path(root) / "results"
        path.write_text(profile)
        named = profile if profile == "topk-sweep" else str(path)
        whole = spent([*BENCHCTL, "run", "--profile", named, "--blocks", str(blocks), "--output", str(results)])
        records = [json.loads(file.read_bytes()) for file in sorted(results.glob("runs/*/run.json"))]
    moments = [[record["times"][name] / 1e9 for name in MOMENTS] for record in records]
    lasting = [[late - early for early, late in pairwise(of_run)] for of_run in moments]
    between = [launch_s - stop_s for (*_, stop_s), (launch_s, *_) in pairwise(moments)]
    row = {name: median(values) for name, values in zip(PHASES, zip(*lasting, strict=True), strict=True)}
    loads_s = sum(of_run[2] for of_run in lasting)
    row |= {"between": median(between), "beside": row["after load"] + median(between)}
    return {"runs": len(records), **row, "loads": loads_s, **whole, "x loads": whole["command"] / loads_s}


def server_start(blocks: int) -> Figures:
    return {"seconds": experiment(SMALL % "forced", blocks)["server"]}


def libraries() -> Figures:
    return {"seconds": median(spent([sys.executable, "-c", LIBRARIES])["command"] for _ in range(5))}


def main() -> None:
    asked = options(__doc__, blocks=3, rounds=1)
    small = {f"small, {kind}": SMALL % stop for kind, stop in (("constant", "forced"), ("random", "natural"))}
    experiments = small | {"demo": "topk-sweep"}
    ways = {name: partial(experiment, profile, asked.blocks) for name, profile in experiments.items()}
    tables = [compared("seconds of a run, of all loads, and of the command", ways, rounds=asked.rounds)]
    starts = {"libraries alone (limit)": libraries, "server": partial(server_start, asked.blocks)}
    tables.append(compared("start of a server", starts, rounds=asked.rounds, ratios=["seconds"]))
    write(asked.json, tables)


if __name__ == "__main__":
    main()
