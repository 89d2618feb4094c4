"""How fast the simulator's core steps, beside the fastest loop that Python could run for the same batch.

    python -m benchmarks.measure.sim_speed [--steps N]

The limit is a loop that keeps only the sum of contexts and the virtual time. The core besides schedules, counts
blocks, prices sections, finishes sequences and makes a step record.
"""

import argparse
import time

from benchctl.guided.params import GuidanceParams
from benchctl.records.jsonl import encode
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core
from benchctl.sim.phase import AnnouncedPhase, AnnouncedRequest
from benchctl.sim.request import Prompt, Request, SamplingParams
from benchctl.sim.simulate import engine_for_config

CASES = ((1, False), (8, False), (64, False), (256, False), (64, True), (256, True))


def core_steps_per_s(batch: int, num_steps: int, *, is_guided: bool, encodes: bool) -> float:
    config = SimConfig(value_model="qwen2.5-1.5b" if is_guided else None, num_kv_blocks=1 << 20)
    core = Core(engine_for_config(config))
    requests = [
        Request(
            request_id=f"r{i}",
            prompt=Prompt.of([f"w{i}"] * 100, config.block_size),
            max_tokens=num_steps,
            ignore_eos=True,
            sampling=SamplingParams(top_k=5, min_p=0.01),
            guidance=GuidanceParams(mode="centered_exp", value_scale=0.0) if is_guided else None,
        )
        for i in range(batch)
    ]
    core.announce(
        AnnouncedPhase([AnnouncedRequest(r.request_id, 0) for r in requests], max_concurrency=None, is_warmup=False)
    )
    for request in requests:
        core.submit(request)
    count, start = 0, time.perf_counter()
    while (output := core.next_step()) is not None:
        count += 1
        if encodes:
            encode(output.record)
    return count / (time.perf_counter() - start)


def limit_steps_per_s(batch: int, num_steps: int) -> float:
    now_ns, context = 0, 100 * batch
    start = time.perf_counter()
    for _ in range(num_steps):
        now_ns += 12_000_000 + round(context * 24.5)
        context += batch
    return num_steps / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    num_steps = parser.parse_args().steps
    print(f"{'batch':>5} {'guided':>6} {'steps/s':>9} {'with log':>9} {'limit':>10} {'limit/core':>10}")
    for batch, is_guided in CASES:
        limit = limit_steps_per_s(batch, num_steps * 20)
        bare = core_steps_per_s(batch, num_steps, is_guided=is_guided, encodes=False)
        logged = core_steps_per_s(batch, num_steps, is_guided=is_guided, encodes=True)
        row = f"{batch:>5} {is_guided!s:>6} {bare:>9,.0f} {logged:>9,.0f} {limit:>10,.0f} {limit / bare:>10.1f}"
        print(row)


if __name__ == "__main__":
    main()
