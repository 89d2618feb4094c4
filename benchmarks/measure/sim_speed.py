"""How fast the simulator steps, beside the fastest loop that Python could run for the same load.

    python -m benchmarks.measure.sim_speed [--azure REQUESTS]

The plain loop keeps the size of the batch, the sum of contexts and a heap of last steps, and nothing else: no
blocks, no sections, no records. The simulator besides schedules, counts blocks, shares prefixes,
preempts, and keeps the columns of every step and request. CPU seconds are those of ``simulate`` alone, the best of
three, in one process.
"""

import argparse
import heapq
import random
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path

from benchctl.guided.params import GuidanceParams
from benchctl.records.files import encode
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, Simulation, simulate
from benchctl.sim.requests import CountedRequests, Prompt, Request, SamplingParams
from benchctl.workload.datasets.published import timestamp_ns

AZURE = Path("../shared/data/azure/AzureLLMInferenceTrace_conv.csv")
BLIS_STEPS_PER_S = 24_000
NUM_REQUESTS = 9000
CODEGEN = SimConfig(
    model="llama-2-7b",
    cost_model="roofline",
    num_kv_blocks=7463,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
)
STEPS_PER_REQUEST = 15


def codegen_arrivals(num_requests: int = NUM_REQUESTS) -> list[int]:
    """Poisson arrivals at 5/s for the first third, then at 10/s, as in the stages of the published workload."""
    draw, now_s, arrivals = random.Random(42), 0.0, []
    for index in range(num_requests):
        now_s += draw.expovariate(5 if index < num_requests // 3 else 10)
        arrivals.append(int(now_s * 1e9))
    return arrivals


def codegen() -> SimLoad:
    """9,000 requests of 566 prompt tokens and 247 output tokens."""
    requests = CountedRequests([566] * NUM_REQUESTS, [247] * NUM_REQUESTS)
    return SimLoad(requests=requests, arrival_ns=codegen_arrivals())


def shared_prefixes() -> SimLoad:
    """Prompts that begin with one of 44 system prompts of 96 tokens, and long answers."""
    draw = random.Random(7)
    groups = [draw.randrange(44) for _ in range(NUM_REQUESTS)]
    requests = tuple(
        Request(
            request_id=f"r{index}",
            prompt=Prompt(
                num_tokens=150,
                digest=str(index),
                asks_for_box=False,
                block_hashes=tuple(("group", group, block) if block < 6 else (index, block) for block in range(9)),
            ),
            max_tokens=draw.randrange(100, 700),
            ignore_eos=True,
        )
        for index, group in enumerate(groups)
    )
    return SimLoad(requests=requests, arrival_ns=codegen_arrivals())


def closed_loop(batch: int) -> SimLoad:
    """Requests that keep ``batch`` rows busy and end once in 15 steps, whatever the batch."""
    draw = random.Random(batch)
    lengths = [round(STEPS_PER_REQUEST * batch * draw.uniform(0.5, 1.5)) for _ in range(6000)]
    return SimLoad(requests=CountedRequests([100] * 6000, lengths), max_concurrency=batch)


def constant_batch(batch: int, num_tokens: int, *, is_guided: bool) -> SimLoad:
    """Rows that begin and end together."""
    requests = tuple(
        Request(
            request_id=f"r{index}",
            prompt=Prompt(num_tokens=100, digest=str(index), asks_for_box=False, block_hashes=()),
            max_tokens=num_tokens,
            ignore_eos=True,
            sampling=SamplingParams(top_k=5, min_p=0.01),
            guidance=GuidanceParams(mode="centered_exp", value_scale=0.0) if is_guided else None,
        )
        for index in range(batch)
    )
    return SimLoad(requests=requests)


def azure(num_requests: int) -> SimLoad:
    """The Azure trace, repeated one after the other."""
    rows = [line.split(",") for line in AZURE.read_text().splitlines()[1:]]
    begin_ns = timestamp_ns(rows[0][0])
    arrivals = [timestamp_ns(row[0]) - begin_ns for row in rows]
    period_ns, count = arrivals[-1] + 10**9, len(rows)
    repeated = (divmod(index, count) for index in range(num_requests))
    arrival_ns = array("q", (arrivals[row] + round_ * period_ns for round_, row in repeated))
    prompts = (int(rows[index % count][1]) for index in range(num_requests))
    outputs = (int(rows[index % count][2]) for index in range(num_requests))
    return SimLoad(requests=CountedRequests(prompts, outputs), arrival_ns=arrival_ns)


def plain_loop(arrivals: list[int], prompt: int, output: int, max_rows: int) -> int:
    """The steps of a loop that knows nothing but sums."""
    now_ns = num_rows = context = step = index = 0
    ends: list[int] = []
    waiting = [*arrivals, 1 << 62]
    while index < len(arrivals) or num_rows:
        if not num_rows:
            now_ns = max(now_ns, waiting[index])
        new_tokens = 0
        while waiting[index] <= now_ns and num_rows < max_rows and new_tokens < 2048:
            num_rows, context, new_tokens, index = num_rows + 1, context + prompt, new_tokens + prompt, index + 1
            heapq.heappush(ends, step + output)
        now_ns += round(4_000_000 + context * 156.5 + new_tokens * 14_000)
        context += num_rows
        step += 1
        while ends and ends[0] <= step:
            heapq.heappop(ends)
            num_rows, context = num_rows - 1, context - prompt - output
    return step


def cpu_s(call: Callable[[], object]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def speed(name: str, config: SimConfig, load: SimLoad, goal: int | None, repeats: int = 3) -> float:
    """Print one line of the table; returns steps per CPU second."""
    simulations: list[Simulation] = []
    best_s = min(cpu_s(lambda: simulations.append(simulate(config, [load]))) for _ in range(repeats))
    simulation = simulations[-1]
    per_s = len(simulation.log) / best_s
    hits = f"  {simulation.num_hit_tokens:,} tokens from the cache" if simulation.num_hit_tokens else ""
    preempted = f"  {simulation.num_preemptions:,} preemptions" if simulation.num_preemptions else ""
    aim = "" if goal is None else f"goal {goal:,}"
    print(f"{name:<42} {len(simulation.log):>10,} {best_s:>8.3f} {per_s:>11,.0f}  {aim}{preempted}{hits}")
    return per_s


def azure_scale(num_requests: int) -> None:
    config = SimConfig(model="llama-3.1-8b", cost_model="roofline", num_kv_blocks=30_000, max_num_seqs=256)
    wall_s = time.monotonic()
    speed(f"Azure trace, {num_requests:,} requests", config, azure(num_requests), None, repeats=1)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  wall time {time.monotonic() - wall_s:.1f} s with the load (goal 60 s), most memory {peak_mb:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", type=int, default=0, help="only the trace, with so many requests")
    if num_requests := parser.parse_args().azure:
        azure_scale(num_requests)
        return
    arrivals, steps = codegen_arrivals(), [0]
    plain_s = min(cpu_s(lambda: steps.append(plain_loop(arrivals, 566, 247, 128))) for _ in range(3))
    print(f"{'load':<42} {'steps':>10} {'CPU s':>8} {'steps/s':>11}")
    print(f"{'plain loop, codegen':<42} {steps[-1]:>10,} {plain_s:>8.3f} {steps[-1] / plain_s:>11,.0f}")
    print(f"{'BLIS, as published':<42} {'':>10} {'':>8} {BLIS_STEPS_PER_S:>11,}")
    for blocks in (7463, 65_352, 1 << 20):
        config = CODEGEN.model_copy(update={"num_kv_blocks": blocks})
        speed(f"codegen, {blocks:,} blocks", config, codegen(), 500_000)
    speed("codegen with noise", CODEGEN.model_copy(update={"noise": "published"}), codegen(), None)
    tight = CODEGEN.model_copy(update={"num_kv_blocks": 500, "enable_prefix_caching": True})
    speed("prefix cache and 500 blocks", tight, shared_prefixes(), 200_000)
    closed = {
        batch: speed(
            f"closed loop, batch {batch}, 15 steps a request",
            SimConfig(cost_model="roofline", num_kv_blocks=1 << 20),
            closed_loop(batch),
            500_000 if batch == 256 else None,
        )
        for batch in (8, 64, 256)
    }
    print(f"  batch 8 / batch 256: {closed[8] / closed[256]:.2f} (goal: at most 2)")
    for batch in (8, 256):
        config = SimConfig(cost_model="roofline", num_kv_blocks=1 << 20)
        load = constant_batch(batch, 50_000, is_guided=False)
        speed(f"constant batch {batch}", config, load, 500_000 if batch == 256 else None)
    for mode, batch, goal in (("aggregate", 64, 200_000), ("aggregate", 256, 200_000), ("exact", 64, None)):
        config = SimConfig(value_model="qwen2.5-1.5b", num_kv_blocks=1 << 20, guided_rows=mode)
        speed(f"guided {mode}, batch {batch}", config, constant_batch(batch, 10_000, is_guided=True), goal)
    for batch in (8, 64, 256):
        config = SimConfig(
            cost_model="roofline", num_kv_blocks=1 << 20, num_speculative_tokens=4, acceptance=0.8, draft_cost=0.05
        )
        speed(f"speculation, 4 drafts, batch {batch}", config, constant_batch(batch, 2000, is_guided=False), None)
    encoded = simulate(CODEGEN, [codegen()])
    log_s = cpu_s(lambda: deque((encode(step) for step in encoded.log.records()), maxlen=0))
    print(f"steps of codegen as lines of a log: {len(encoded.log) / log_s:,.0f} a CPU second")


if __name__ == "__main__":
    main()
